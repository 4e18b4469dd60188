"""The control plane's end of a P4 pipeline: native/p4/netfold.p4 in bmv2's simple_switch.

The pipeline forwards frames between hosts and reduces for the jobs that are installed. It knows nothing of admission:
its owner says which workers a job has, from which addresses and ports of the switch.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from netfold._native import protocol
from netfold.switch import thrift_client as thrift
from netfold.switch.thrift_client import ThriftClient, ThriftError
from netfold.switch_protocol import control_messages

# Outcomes in the pipeline's counters, beside the reasons to drop, which have the protocol's numbers.
_STORED, _COMPLETED, _RESENT, _DISAGREES = 0, 13, 14, 15
_OUTCOMES = 16
# Workers of a job, and the largest window that a job gets: a share of the slots that leaves some to all other jobs.
MAX_WORKERS = 32
MAX_WINDOW = 64
# Ports of a simple_switch: those that a port of 9 bits can name, without the one that drops.
MAX_PORT = 511
_FLOOD_GROUP = 1
# Multicast groups of jobs: this plus the job's index.
_FIRST_GROUP = 2
_CALL_S = 5.0
# Names of tables in the program.
_JOBS, _MEMBERS = "SwitchIngress.check.job", "SwitchIngress.check.member"
_ADDRESSES, _HOSTS = "SwitchEgress.address.address", "SwitchIngress.hosts"
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
class PipelineJob:
    """A job as the pipeline gets it.

    ip, port: where its workers send their packets; an address of the control plane's host.
    window: chunks that a worker may have in flight.
    """

    id: int
    epoch: int
    incarnation: int
    ip: str
    port: int
    window: int
    members: Sequence[PipelineMember]


@dataclass
class _Installed:
    index: int
    base: int
    slots: int
    entries: list[tuple[str, int]] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    group: int | None = None


class Bmv2:
    """A simple_switch that runs native/p4/netfold.p4. Opening it ends what an earlier owner left there.

    hosts: by IPv4 address. Methods raise PipelineError, and block for at most a few seconds.
    """

    def __init__(self, host: str, port: int, hosts: Mapping[str, Host]) -> None:
        self.endpoint = f"{host}:{port}"
        self._hosts = dict(hosts)
        self._installed: dict[int, _Installed] = {}
        try:
            self._client = ThriftClient(host, port, _CALL_S)
        except OSError as error:
            raise PipelineError(f"no simple_switch answers at {self.endpoint}: {error}") from None
        try:
            self._read_program()
            self._clear()
            self._forward()
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, endpoint: str, hosts_file: Path) -> Bmv2:
        """Open the simple_switch whose Thrift server is at `endpoint`. Raises ValueError for a bad file of hosts."""
        host, port = control_messages.parse_endpoint(endpoint, what="--pipeline")
        return cls(host, port, read_hosts(hosts_file))

    def leads_to(self, ip: str) -> bool:
        """Whether frames to that address are forwarded."""
        return ip in self._hosts

    def close(self) -> None:
        self._client.close()

    def _read_program(self) -> None:
        """Read from the program in the switch how much it holds."""
        config = json.loads(self._call(_STANDARD, "bm_get_config"))
        sizes = {each["name"]: each["size"] for each in config["register_arrays"]}
        values = sum(name.startswith("SwitchIngress.values.sum_") for name in sizes)
        if values == 0 or "SwitchIngress.slot_next" not in sizes:
            raise PipelineError(f"the program in the simple_switch at {self.endpoint} is not native/p4/netfold.p4")
        self.payload_bytes = 4 * values
        self.slots = int(sizes["SwitchIngress.slot_next"])
        self.jobs = int(sizes["SwitchIngress.job_results"])

    def _clear(self) -> None:
        """Remove the jobs and hosts that an earlier owner installed.

        bm_reset_state would remove the constant entries of the program's tables as well.
        """
        for table in (_JOBS, _MEMBERS, _ADDRESSES, _HOSTS):
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
        taken = {each.index for each in self._installed.values()}
        index = min(set(range(self.jobs)) - taken, default=None)
        if index is None:
            raise PipelineError(f"the pipeline serves {self.jobs} jobs already")
        slots = protocol.job_slots(job.window)
        installed = _Installed(index, self._free_range(slots), slots)
        self._installed[job.id] = installed
        try:
            self._install(job, installed)
        except BaseException:
            self.remove(job.id)
            raise

    def _install(self, job: PipelineJob, installed: _Installed) -> None:
        index, base, slots = installed.index, installed.base, installed.slots
        everyone = (1 << len(job.members)) - 1
        for slot in range(slots):
            self._write("slot_next", base + slot, slot)
        self._call(
            _STANDARD,
            "bm_register_write_range",
            thrift.string("SwitchIngress.slot_workers"),
            thrift.i32(base),
            thrift.i32(base + slots),
            thrift.i64(everyone),
        )
        self._write("job_results", index, 0)
        self._write("job_mismatches", index, 0)
        for outcome in range(_OUTCOMES):
            zero = thrift.record(_1=thrift.i64(0), _2=thrift.i64(0))
            counter = thrift.string("SwitchIngress.outcomes"), thrift.i32(index * _OUTCOMES + outcome)
            self._call(_STANDARD, "bm_counter_write", *counter, zero)
        installed.group = self._call(_PRE, "bm_mc_mgrp_create", thrift.i32(_FIRST_GROUP + index))
        for worker, member in enumerate(job.members):
            host = self._hosts.get(member.ip)
            if host is None:
                raise PipelineError(f"no port of the switch leads to {member.ip}: name it in the file of hosts")
            address = _ip(member.ip)
            udp = member.port.to_bytes(2, "big")
            key = [_short(index), _short(worker), address, udp, _short(host.port)]
            data = [(1 << worker).to_bytes(4, "big"), _short(member.name)]
            installed.entries.append(self._add(_MEMBERS, key, "SwitchIngress.check.set_member", data))
            key = [_short(index), _short(worker)]
            data = [host.mac, address, udp]
            installed.entries.append(self._add(_ADDRESSES, key, "SwitchEgress.address.set_address", data))
            installed.nodes.append(self._join(installed.group, worker + 1, {host.port}))
        numbers = [job.id, job.epoch, job.incarnation, everyone, base, slots - 1]
        identity, epoch, incarnation, every, first, mask = (number.to_bytes(4, "big") for number in numbers)
        size, group = _short(len(job.members)), _short(_FIRST_GROUP + index)
        data = [_short(index), identity, epoch, incarnation, size, every, first, mask, group]
        # Last: the job's packets count from here on.
        key = [_ip(job.ip), job.port.to_bytes(2, "big")]
        installed.entries.append(self._add(_JOBS, key, "SwitchIngress.check.set_job", data))

    def remove(self, job: int) -> None:
        """Let the pipeline forget a job; its packets are then forwarded like any others. Unknown jobs are ignored."""
        installed = self._installed.pop(job, None)
        if installed is None:
            return
        for table, handle in reversed(installed.entries):
            self._call(_STANDARD, "bm_mt_delete_entry", thrift.string(table), thrift.i32(handle))
        if installed.group is not None:
            for node in installed.nodes:
                self._call(_PRE, "bm_mc_node_dissociate", thrift.i32(installed.group), thrift.i32(node))
                self._call(_PRE, "bm_mc_node_destroy", thrift.i32(node))
            self._call(_PRE, "bm_mc_mgrp_destroy", thrift.i32(installed.group))

    def counters(self, job: int) -> dict[str, int]:
        """Count a job's packets by what became of them: `contributions`, `results`, `results_resent`, `mismatches`,
        and the protocol's reasons to drop. Raises KeyError for a job that is not installed.
        """
        index = self._installed[job].index
        counts = []
        for outcome in range(_OUTCOMES):
            counter = thrift.string("SwitchIngress.outcomes"), thrift.i32(index * _OUTCOMES + outcome)
            counts.append(int(self._call(_STANDARD, "bm_counter_read", *counter)[2]))
        named = {reason: counts[number] for number, reason in enumerate(protocol.DROPS) if number != _STORED}
        return {
            "contributions": counts[_STORED] + counts[_COMPLETED],
            "results": counts[_COMPLETED],
            "results_resent": counts[_RESENT],
            "mismatches": counts[_DISAGREES],
            **named,
        }

    def missing(self, job: int, chunk: int) -> list[int]:
        """The workers whose contribution to `chunk` has not come; none for a chunk that is complete or unknown."""
        installed = self._installed[job]
        slot = installed.base + chunk % installed.slots
        next_chunk, contributed = self._read("slot_next", slot), self._read("slot_workers", slot)
        if chunk == next_chunk:
            contributed = 0
        elif chunk + installed.slots != next_chunk:
            return []
        return [worker for worker in range(len(installed.nodes)) if not contributed >> worker & 1]

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
            return self._client.call(service, method, *context, *arguments)
        except ThriftError as error:
            raise PipelineError(f"simple_switch at {self.endpoint}: {error}") from None
        except OSError as error:
            # A late reply would be taken for that of the next call.
            self._client.close()
            raise PipelineError(f"simple_switch at {self.endpoint} does not answer: {error}") from None


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
