"""The control plane's end of a P4 pipeline: core/native/p4/netfold.p4 in bmv2's simple_switch.

The pipeline forwards frames between hosts and reduces for the jobs that are installed. It knows nothing of admission:
its owner says which workers a job has, from which addresses and ports of the switch.

One control plane owns a pipeline, by a lease in one of its registers: the owner's incarnation, and a number that the
owner counts up. A lease that was not renewed for LEASE_S has ended. The pipeline itself compares the incarnation, so an
owner that was only slow cannot let packets count any more.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from netfold._native import protocol
from netfold.switch import thrift_client as thrift
from netfold.switch.thrift_client import ThriftClient, ThriftError
from netfold.switch_protocol import control_messages

# Outcomes in the pipeline's counters, beside the reasons to drop, which have the protocol's numbers.
_STORED, _COMPLETED, _RESENT, _DISAGREES, _SUMMED, _SUM_RESENT, _ASKED = 0, 13, 14, 15, 16, 17, 18
_OUTCOMES = 19
# Counters of a job; those of the parent's packets begin in the middle.
_COUNTERS, _OF_PARENT = 64, 32
# The time between two renewals of a lease, and the time that a lease lasts: longer than any call blocks the owner.
BEAT_S = 0.5
LEASE_S = 6.0
# If two take a free lease at once, the second one to write has it after this time.
_SETTLE_S = 0.2
# Workers of a job, and the largest window that a job gets: a share of the slots that leaves some to all other jobs.
MAX_WORKERS = 32
MAX_WINDOW = 64
# Ports of a simple_switch: those that a port of 9 bits can name, without the one that drops.
MAX_PORT = 511
_FLOOD_GROUP = 1
# Multicast groups of jobs: this plus the job's index.
_FIRST_GROUP = 2
_CALL_S = 5.0
# Far beyond every chunk.
_NO_CHUNK = 1 << 62
# Names of tables in the program.
_JOBS, _MEMBERS, _PARENTS = "SwitchIngress.check.job", "SwitchIngress.check.member", "SwitchIngress.check.parent"
_ADDRESSES, _HOSTS = "SwitchEgress.address.address", "SwitchIngress.hosts"
_OWN, _ABOVE = "SwitchEgress.address.own", "SwitchEgress.address.above"
_STANDARD, _PRE = "standard", "simple_pre_lag"


class PipelineError(OSError):
    """The pipeline cannot be reached, runs another program or has no space."""


@dataclass(frozen=True)
class Host:
    """A host: its Ethernet address, and the port of the switch that leads to it."""

    mac: bytes
    port: int


@dataclass(frozen=True)
class PipelineMember:
    """A worker of a job: the address that its packets come from, and its number in the whole job."""

    ip: str
    port: int
    name: int


@dataclass(frozen=True)
class PipelineParent:
    """The parent of a job, which is another switch of any kind.

    job, epoch, incarnation, worker: the identity there.
    ip, port: where sums go.
    own_ip, own_port: where sums come from, and results go: an address of the control plane's host.
    """

    job: int
    epoch: int
    incarnation: int
    worker: int
    ip: str
    port: int
    own_ip: str
    own_port: int


@dataclass(frozen=True)
class PipelineJob:
    """A job as the pipeline gets it.

    ip, port: where its workers send their packets; an address of the control plane's host.
    window: chunks that a worker may have in flight.
    """

    id: int
    epoch: int
    ip: str
    port: int
    window: int
    members: Sequence[PipelineMember]
    parent: PipelineParent | None = None


@dataclass
class _Installed:
    index: int
    base: int
    slots: int
    has_parent: bool
    entries: list[tuple[str, int]] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    group: int | None = None


class Bmv2:
    """A simple_switch that runs core/native/p4/netfold.p4. Opening it ends what an earlier owner left there.

    hosts: by IPv4 address.
    incarnation: of the owner, in its jobs' packets; 1 to 2^32 - 1.
    lost: why the pipeline cannot be used until `reopen` succeeds; "" while it can.

    Methods raise PipelineError, and block for at most a few seconds; the constructor and `reopen` also as long as a
    lease lasts. `beat` and `reopen` may be called by another thread than all other methods.
    """

    def __init__(self, host: str, port: int, hosts: Mapping[str, Host], *, incarnation: int) -> None:
        self.endpoint = f"{host}:{port}"
        self.incarnation = incarnation
        self.lost = ""
        self._address = host, port
        self._hosts = dict(hosts)
        self._lock = threading.Lock()
        self._beats = 0
        self._open()

    @classmethod
    def open(cls, endpoint: str, hosts_file: Path, *, incarnation: int) -> Bmv2:
        """Open the simple_switch whose Thrift server is at `endpoint`. Raises ValueError for a bad file of hosts."""
        host, port = control_messages.parse_endpoint(endpoint, what="--pipeline")
        return cls(host, port, read_hosts(hosts_file), incarnation=incarnation)

    def _open(self) -> None:
        try:
            self._client = ThriftClient(*self._address, _CALL_S)
        except OSError as error:
            raise PipelineError(f"no simple_switch answers at {self.endpoint}: {error}") from None
        try:
            self._read_program()
            self._acquire()
            self._clear()
            self._forward()
        except BaseException:
            self._client.close()
            raise
        self._installed: dict[int, _Installed] = {}

    def reopen(self) -> None:
        """Connect again, take the lease and fill the tables; no job is installed then."""
        self._open()
        self.lost = ""

    def leads_to(self, ip: str) -> bool:
        """Whether frames to that address are forwarded."""
        return ip in self._hosts

    def close(self) -> None:
        """End the lease and disconnect."""
        if not self.lost:
            with contextlib.suppress(PipelineError):
                if self._read("lease", 0) == self.incarnation:
                    self._write("lease", 0, 0)
        self._client.close()

    def beat(self) -> None:
        """Renew the lease. `lost` is set where that fails."""
        self._check_lease()
        self._beats += 1
        self._write("lease", 1, self._beats)

    def _check_lease(self) -> None:
        owner = self._read("lease", 0)
        if owner != self.incarnation:
            self.lost = f"the simple_switch at {self.endpoint} is no longer this switch's: " + (
                f"another control plane has it (incarnation {owner:08x})" if owner else "somebody cleared its registers"
            )
            raise PipelineError(self.lost)

    def _acquire(self) -> None:
        """Take the lease: at once where it is free or this owner's own, else when it ends."""
        owner, beats, since = self._read("lease", 0), self._read("lease", 1), time.monotonic()
        while owner not in (0, self.incarnation) and time.monotonic() - since < LEASE_S:
            time.sleep(BEAT_S / 5)
            before = owner, beats
            owner, beats = self._read("lease", 0), self._read("lease", 1)
            if owner != before[0]:
                since = time.monotonic()
            elif beats != before[1]:
                raise self._taken(owner)
        self._write("lease", 0, self.incarnation)
        time.sleep(_SETTLE_S)
        if (owner := self._read("lease", 0)) != self.incarnation:
            raise self._taken(owner)

    def _taken(self, owner: int) -> PipelineError:
        return PipelineError(
            f"the simple_switch at {self.endpoint} has a control plane that is alive (incarnation {owner:08x}), and "
            "two would clear each other's jobs: stop that one first, or give each a pipeline of its own"
        )

    def _read_program(self) -> None:
        """Read from the program in the switch how much it holds."""
        config = json.loads(self._call(_STANDARD, "bm_get_config"))
        sizes = {each["name"]: each["size"] for each in config["register_arrays"]}
        values = sum(name.startswith("SwitchIngress.values.sum_") for name in sizes)
        if values == 0 or "SwitchIngress.lease" not in sizes:
            raise PipelineError(f"the program in the simple_switch at {self.endpoint} is not core/native/p4/netfold.p4")
        self.payload_bytes = 4 * values
        self.slots = int(sizes["SwitchIngress.slot_next"])
        self.jobs = int(sizes["SwitchIngress.job_results"])

    def _clear(self) -> None:
        """Remove the jobs and hosts that an earlier owner installed.

        bm_reset_state would remove the constant entries of the program's tables as well.
        """
        for table in (_JOBS, _MEMBERS, _PARENTS, _ADDRESSES, _OWN, _ABOVE, _HOSTS):
            self._call(_STANDARD, "bm_mt_clear_entries", thrift.string(table), thrift.boolean(False))
        copies = json.loads(self._call(_PRE, "bm_mc_get_entries"))
        for node in copies["l1_handles"]:
            self._call(_PRE, "bm_mc_node_destroy", thrift.i32(node["handle"]))
        for group in copies["mgrps"]:
            self._call(_PRE, "bm_mc_mgrp_destroy", thrift.i32(group["id"]))

    def _forward(self) -> None:
        """Forward frames between the hosts, and flood those to any other address."""
        for host in self._hosts.values():
            self._add(_HOSTS, [host.mac], "SwitchIngress.forward", [_short(host.port)])
        group = self._call(_PRE, "bm_mc_mgrp_create", thrift.i32(_FLOOD_GROUP))
        self._join(group, 1, {host.port for host in self._hosts.values()})

    def install(self, job: PipelineJob) -> None:
        """Let the pipeline reduce for `job`, whose id is new. On an error nothing of the job stays."""
        self._check_usable()
        self._check_lease()
        taken = {each.index for each in self._installed.values()}
        index = min(set(range(self.jobs)) - taken, default=None)
        if index is None:
            raise PipelineError(f"the pipeline serves {self.jobs} jobs already")
        slots = protocol.job_slots(job.window)
        installed = _Installed(index, self._free_range(slots), slots, job.parent is not None)
        self._installed[job.id] = installed
        try:
            self._install(job, installed)
        except BaseException:
            self.remove(job.id)
            raise

    def _install(self, job: PipelineJob, installed: _Installed) -> None:
        index, base, slots = installed.index, installed.base, installed.slots
        everyone = (1 << len(job.members)) - 1
        # As if all had contributed to the chunk before, and its result had come. Until all of this is written, no
        # packet is of a slot's chunk: this process may be stopped in here, and go on when another owner has the slots.
        for register, value in (("slot_next", _NO_CHUNK), ("slot_workers", everyone), ("slot_complete", 1)):
            name = thrift.string(f"SwitchIngress.{register}")
            first, end = thrift.i32(base), thrift.i32(base + slots)
            self._call(_STANDARD, "bm_register_write_range", name, first, end, thrift.i64(value))
        for slot in range(slots):
            self._write("slot_next", base + slot, slot)
        for register in ("job_results", "job_mismatches", "job_sums"):
            self._write(register, index, 0)
        for outcome in _counted(installed.has_parent):
            zero = thrift.record(_1=thrift.i64(0), _2=thrift.i64(0))
            self._call(_STANDARD, "bm_counter_write", *_counter(index, outcome), zero)
        installed.group = self._call(_PRE, "bm_mc_mgrp_create", thrift.i32(_FIRST_GROUP + index))
        for worker, member in enumerate(job.members):
            host = self._host(member.ip)
            key = [_short(index), _short(worker), _ip(member.ip), _short(member.port), _short(host.port)]
            data = [_long(1 << worker), _short(member.name)]
            installed.entries.append(self._add(_MEMBERS, key, "SwitchIngress.check.set_member", data))
            data = [host.mac, _ip(member.ip), _short(member.port)]
            key = [_short(index), _short(worker)]
            installed.entries.append(self._add(_ADDRESSES, key, "SwitchEgress.address.set_address", data))
            installed.nodes.append(self._join(installed.group, worker + 1, {host.port}))
        up = 0
        place = [*map(_long, (everyone, base, slots - 1)), _short(_FIRST_GROUP + index)]
        identity = [_long(number) for number in (job.id, job.epoch, self.incarnation)]
        if job.parent is not None:
            up = self._install_parent(job, job.parent, installed, identity, place)
        data = [b"\0", _short(index), *identity, _long(self.incarnation), _short(len(job.members)), *place]
        data += [bytes([installed.has_parent]), _short(up)]
        # Last: the job's packets count from here on.
        key = [_ip(job.ip), _short(job.port)]
        installed.entries.append(self._add(_JOBS, key, "SwitchIngress.check.set_job", data))

    def _install_parent(
        self,
        job: PipelineJob,
        parent: PipelineParent,
        installed: _Installed,
        identity: Sequence[bytes],
        place: Sequence[bytes],
    ) -> int:
        """Let sums go to the parent, and its results count; return the port that leads to the parent.

        identity: of the job here.
        place: where its slots are, and its workers' multicast group.
        """
        index = _short(installed.index)
        above, own, job_host = self._host(parent.ip), self._host(parent.own_ip), self._host(job.ip)
        there = [_long(number) for number in (parent.job, parent.epoch, parent.incarnation)]

        key = [index, _ip(parent.ip), _short(parent.port), _short(above.port)]
        installed.entries.append(self._add(_PARENTS, key, "NoAction", []))

        data = [*identity, job_host.mac, _ip(job.ip), _short(job.port)]
        installed.entries.append(self._add(_OWN, [index], "SwitchEgress.address.set_identity", data))

        data = [*there, own.mac, _ip(parent.own_ip), _short(parent.own_port), _short(parent.worker)]
        data += [above.mac, _ip(parent.ip), _short(parent.port)]
        installed.entries.append(self._add(_ABOVE, [index], "SwitchEgress.address.set_parent", data))

        data = [b"\1", index, *there, _long(self.incarnation), _short(parent.worker), *place, b"\1", _short(above.port)]
        key = [_ip(parent.own_ip), _short(parent.own_port)]
        installed.entries.append(self._add(_JOBS, key, "SwitchIngress.check.set_job", data))
        return above.port

    def _host(self, ip: str) -> Host:
        host = self._hosts.get(ip)
        if host is None:
            raise PipelineError(f"no port of the switch leads to {ip}: name it in the file of hosts")
        return host

    def remove(self, job: int) -> None:
        """Let the pipeline forget a job; its packets are then forwarded like any others. Unknown jobs are ignored."""
        installed = self._installed.pop(job, None)
        if installed is None or self.lost:
            return
        for table, handle in reversed(installed.entries):
            self._call(_STANDARD, "bm_mt_delete_entry", thrift.string(table), thrift.i32(handle))
        if installed.group is not None:
            for node in installed.nodes:
                self._call(_PRE, "bm_mc_node_dissociate", thrift.i32(installed.group), thrift.i32(node))
                self._call(_PRE, "bm_mc_node_destroy", thrift.i32(node))
            self._call(_PRE, "bm_mc_mgrp_destroy", thrift.i32(installed.group))

    def counters(self, job: int) -> dict[str, Any]:
        """Count a job's packets by what became of them, as DataPlane.counters does.

        Raises KeyError for a job that is not installed.
        """
        self._check_usable()
        installed = self._installed[job]
        counts = dict.fromkeys(range(_COUNTERS), 0)
        for outcome in _counted(installed.has_parent):
            counts[outcome] = int(self._call(_STANDARD, "bm_counter_read", *_counter(installed.index, outcome))[2])
        drops, parent_drops = (
            {reason: counts[first + number] if number else 0 for number, reason in enumerate(protocol.DROPS)}
            for first in (0, _OF_PARENT)
        )
        drops["duplicate"] += counts[_SUM_RESENT]
        return {
            "contributions": counts[_STORED] + counts[_COMPLETED] + counts[_SUMMED],
            "results": counts[_COMPLETED] + counts[_OF_PARENT + _COMPLETED],
            "results_resent": counts[_RESENT],
            "mismatches": counts[_DISAGREES] + counts[_OF_PARENT + _DISAGREES],
            "sums_sent": counts[_SUMMED] + counts[_SUM_RESENT],
            "sums_resent": counts[_SUM_RESENT],
            "parent_nacks": counts[_OF_PARENT + _ASKED],
            "drops": drops,
            "parent_drops": parent_drops,
        }

    def missing(self, job: int, chunk: int) -> list[int]:
        """The workers whose contribution to `chunk` has not come; none for a chunk that is complete or unknown."""
        self._check_usable()
        installed = self._installed[job]
        slot = installed.base + chunk % installed.slots
        next_chunk, contributed = self._read("slot_next", slot), self._read("slot_workers", slot)
        if chunk == next_chunk:
            contributed = 0
        elif chunk + installed.slots != next_chunk:
            return []
        return [worker for worker in range(len(installed.nodes)) if not contributed >> worker & 1]

    def _check_usable(self) -> None:
        if self.lost:
            raise PipelineError(self.lost)

    def _free_range(self, slots: int) -> int:
        """The first of `slots` slots in succession that no job has."""
        first = 0
        for each in sorted(self._installed.values(), key=lambda each: each.base):
            if each.base - first >= slots:
                break
            first = each.base + each.slots
        if first + slots > self.slots:
            raise PipelineError(f"the pipeline has {self.slots} slots, and no {slots} of them in succession are free")
        return first

    def _join(self, group: int, replica: int, ports: set[int]) -> int:
        """Add a copy of the packets of `group` for each of `ports`; return the node."""
        bits = "".join("1" if port in ports else "0" for port in range(max(ports, default=0), -1, -1))
        node: int = self._call(_PRE, "bm_mc_node_create", thrift.i32(replica), thrift.string(bits), thrift.string(""))
        self._call(_PRE, "bm_mc_node_associate", thrift.i32(group), thrift.i32(node))
        return node

    def _add(self, table: str, key: Sequence[bytes], action: str, data: Sequence[bytes]) -> tuple[str, int]:
        exact = [thrift.record(_1=thrift.i32(0), _2=thrift.record(_1=thrift.string(part))) for part in key]
        arguments = thrift.records(exact), thrift.string(action), thrift.strings(data), thrift.record()
        handle: int = self._call(_STANDARD, "bm_mt_add_entry", thrift.string(table), *arguments)
        return table, handle

    def _write(self, register: str, index: int, value: int) -> None:
        name = thrift.string(f"SwitchIngress.{register}")
        self._call(_STANDARD, "bm_register_write", name, thrift.i32(index), thrift.i64(value))

    def _read(self, register: str, index: int) -> int:
        name = thrift.string(f"SwitchIngress.{register}")
        value: int = self._call(_STANDARD, "bm_register_read", name, thrift.i32(index))
        return value

    def _call(self, service: str, method: str, *arguments: thrift.Value) -> Any:
        # Only these calls do not begin with the number of the context, which is 0 in a simple_switch.
        context = () if method in ("bm_reset_state", "bm_get_config") else (thrift.i32(0),)
        try:
            with self._lock:
                return self._client.call(service, method, *context, *arguments)
        except OSError as error:
            if isinstance(error, ThriftError) and error.code is not None:
                raise PipelineError(f"simple_switch at {self.endpoint}: {error}") from None
            # A late reply would be taken for that of the next call.
            self._client.close()
            self.lost = f"the simple_switch at {self.endpoint} cannot be reached: {error}"
            raise PipelineError(self.lost) from None


def read_hosts(path: Path) -> dict[str, Host]:
    """Read the file of hosts: JSON, by IPv4 address an object with `mac` and `port`. Raises ValueError, OSError."""
    example = '{"10.0.0.1": {"mac": "02:00:00:00:00:01", "port": 0}}'
    try:
        named = json.loads(path.read_text())
        hosts = {
            ipaddress.IPv4Address(ip): Host(bytes.fromhex(place["mac"].replace(":", "")), place["port"])
            for ip, place in named.items()
        }
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no file of hosts such as {example}: {type(error).__name__}: {error}") from None
    for ip, host in hosts.items():
        if len(host.mac) != 6 or type(host.port) is not int or not 0 <= host.port < MAX_PORT:
            raise ValueError(f"{path}: host {ip} needs a mac of 6 bytes and a port from 0 to {MAX_PORT - 1}")
    return {str(ip): host for ip, host in hosts.items()}


def _ip(text: str) -> bytes:
    return ipaddress.IPv4Address(text).packed


def _short(value: int) -> bytes:
    return value.to_bytes(2, "big")


def _long(value: int) -> bytes:
    return value.to_bytes(4, "big")


def _counted(has_parent: bool) -> list[int]:
    """The outcomes that a job's packets can have."""
    return [*range(_OUTCOMES), *(range(_OF_PARENT, _OF_PARENT + _OUTCOMES) if has_parent else ())]


def _counter(index: int, outcome: int) -> tuple[thrift.Value, thrift.Value]:
    return thrift.string("SwitchIngress.outcomes"), thrift.i32(index * _COUNTERS + outcome)
