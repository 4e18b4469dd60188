"""Choose the paths of a group's collectives on device memory: once, at the first call, the same on every rank."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Store, TCPStore

from netfold.communicator import Group
from netfold.errors import NetfoldError
from netfold.torch.calls import Prepared
from netfold.torch.device import arithmetic, capability_exchange, ipc, pinned
from netfold.torch.device.compressed_sums import MIN_BYTES as COMPRESSED_MIN_BYTES
from netfold.torch.device.compressed_sums import CompressedSums, make_compressed_sums
from netfold.torch.device.device_api import DeviceApi, wait_for
from netfold.torch.device.host_staging import HostStaging, seconds_until
from netfold.torch.device.intra_host import MIN_BYTES, IntraHostPath, IntraHostReducer, NcclReducer, host_groups

log = logging.getLogger("netfold")

# The timeout of making a subgroup. All of its ranks are already running.
_JOIN_S = 30.0
_LOOPBACK = "127.0.0.1"
# On closing, a group waits SETTLE_S for its own device, and then MEET_S for the other ranks' devices.
SETTLE_S, MEET_S = 30.0, 10.0
AFTER_ABORT_S = 2.0


@dataclass
class DevicePaths:
    """The paths of a group on this rank."""

    device: torch.device
    staged: HostStaging
    intra_host: IntraHostPath | None
    compressed: CompressedSums | None  # for calls that `intra_host` does not take
    done: Any  # the stream of the Works' results
    reason: str  # the same sentence on all ranks, but for the kind of pinned memory that a rank got
    parts: list[Any] = field(default_factory=list)  # subgroups, and the NCCL group

    def other_than_staged(self, call: Prepared) -> IntraHostPath | CompressedSums | None:
        """The path that runs the call; None if `staged` does. The same on all ranks."""
        if self.intra_host is not None and self.intra_host.takes(call):
            return self.intra_host
        return self.compressed if self.compressed is not None and self.compressed.takes(call) else None

    def abort(self, reason: str) -> None:
        """Abort the subgroups, so that ranks that wait for this one get the reason."""
        for part in self.parts:
            with contextlib.suppress(RuntimeError):  # NCCL's error after a device failed; the first error is reported
                part.abort(reason)

    def close(self, *, failed: bool, meet_s: float) -> None:
        """Free the paths, on the driver's thread. Idempotent.

        Results come first: the host waits at most `SETTLE_S` for the device's work, and `meet_s` for the other ranks'
        devices. Work is aborted only after a failure or that time.
        """
        between = None if self.intra_host is None else self.intra_host.between
        stages = [self.staged] if between is None else [self.staged, between]
        settled = not failed and self._settle(SETTLE_S)
        if not settled and not failed:
            log.warning("the device was not done %g s after its group was closed; it is cut off", SETTLE_S)
        if not settled:
            self.abort("the group was closed")
        over = settled or self._settle(AFTER_ABORT_S)
        if self.intra_host is not None:
            self.intra_host.release(settled=over)
        for stage in stages:
            stage.memory.release(settled=over)
        parts, self.parts = self.parts, []
        # Groups last: closing one ends the wait of other ranks in it.
        for part in sorted(parts, key=lambda each: isinstance(each, Group)):
            if isinstance(part, Group):
                part.close()
            elif settled:
                part.close(meet_s)

    def _settle(self, wait_s: float) -> bool:
        """Wait for the device's work. Returns whether it is done."""
        deadline = time.monotonic() + wait_s
        intra_host = self.intra_host.streams if self.intra_host is not None else []
        try:
            for stream in (self.staged.out, self.staged.back, self.done, *intra_host):
                wait_for(stream.record_event(), deadline, 0, "the end of a group")
        except RuntimeError:
            return False
        return True


def choose_paths(group: Group, device_api: DeviceApi, device: torch.device, deadline: float) -> DevicePaths:
    """Choose the paths. Collective; the first operation of a group's driver. Raises as `exchange_capabilities`."""
    slots: pinned.Slots | None = None
    problem = ""
    try:
        device_api.native_driver(device)
        slots = slots_of(group, device_api)
    except NetfoldError as error:
        problem = str(error)
    except RuntimeError as error:
        problem = f"rank {group.rank}: {device} cannot be used: {error}"
    builder = _Builder(group, device_api, device, deadline)
    try:
        facts = capability_exchange.exchange_capabilities(
            group, capability_exchange.capabilities_of(group, device_api, device, problem), deadline
        )
        intra_host, how = builder.intra_host([each.uuid for each in facts])
        assert slots is not None, "its problem is this rank's, and raised on all"
    except BaseException:
        if slots is not None:
            slots.release(settled=True)  # not used yet
        for each in builder.parts:
            if isinstance(each, Group):
                each.close()
            else:
                each.abort("the group was not made")
        raise
    paths = builder.paths(slots, intra_host, how)
    expected = group.options.intra_host == "auto" and len(set(group.nodes)) < group.size
    level = logging.WARNING if expected and intra_host is None and group.rank == 0 else logging.DEBUG
    log.log(level, "rank %d of %d: %s", group.rank, group.size, paths.reason)
    return paths


def slots_of(group: Group, device_api: DeviceApi) -> pinned.Slots:
    """Allocate a group's slots. Raises NetfoldError if the host refuses."""
    nbytes = int(group.options.pinned_bytes or 0) or pinned.default_bytes(group.size)
    return pinned.Slots(device_api, nbytes, group.rank, shared=group.shares_buckets)


class _Builder:
    """Makes the paths, and keeps the subgroups that it makes for them."""

    def __init__(self, group: Group, device_api: DeviceApi, device: torch.device, deadline: float) -> None:
        self._group = group
        self._device_api = device_api
        self._device = device
        self._deadline = deadline
        self.parts: list[Any] = []

    def paths(self, slots: pinned.Slots, intra_host: IntraHostPath | None, how: str) -> DevicePaths:
        device_api, device = self._device_api, self._device
        count, nbytes = len(slots.memory), slots.memory[0].numel()
        kind = "shared, pinned" if slots.registered else "pinned"
        reason = f"{device_api.kind}: {how}staged through {count} x {nbytes} bytes of {kind} memory"
        staged = HostStaging(self._group, device_api, device, slots)
        compressed = make_compressed_sums(self._group, device_api, device_api.new_stream(device), staged)
        if compressed is not None:
            reason += f"; f32 sums by i8 from {COMPRESSED_MIN_BYTES} bytes are quantised on the device"
        return DevicePaths(
            device,
            staged,
            intra_host,
            compressed,
            device_api.new_stream(device),
            reason,
            self.parts,
        )

    def intra_host(self, uuids: Sequence[str]) -> tuple[IntraHostPath | None, str]:
        """Make the intra-host path. Returns it, or None, and the reason's text about it."""
        group, setting = self._group, str(self._group.options.intra_host)
        members, peers, reason = host_groups(group.nodes, group.rank)
        if setting == "nccl":
            reason = reason or _shared_device(group.nodes, uuids)
            if reason:
                raise ValueError(f"NETFOLD_INTRA_HOST=nccl cannot be done: {reason}; auto does without")
            return self._by_nccl(members, peers)
        if setting == "off":
            reason = "NETFOLD_INTRA_HOST=off"
        stream = self._device_api.new_stream(self._device)
        windows: list[torch.Tensor] = []
        if not reason:
            windows, reason = ipc.open_windows(group, members, self._device_api, stream, self._device, self._deadline)
        if reason:
            return None, f"IPC disabled because {reason}; "
        local = group if len(members) == group.size else self._subgroup("host", members)
        return self._path(stream, ipc.IpcReducer(self._device_api, stream, local, windows), members, peers, "IPC")

    def _by_nccl(self, members: Sequence[int], peers: Sequence[int]) -> tuple[IntraHostPath | None, str]:
        watch = self._subgroup("watch", members)
        nccl = self._device_api.nccl(self._device, self._host_store(watch), watch.rank, watch.size)
        self.parts.append(nccl)
        stream = self._device_api.new_stream(self._device)
        sums = NcclReducer(self._device_api, stream, nccl, len(members))
        return self._path(stream, sums, members, peers, "NCCL", watch)

    def _host_store(self, among: Group) -> Store:
        """Make a store of the ranks of a host, in which NCCL's find each other. The first of them serves it.

        Collective in `among`. The job's own store may be gone, or have none of the later ranks (netfold.elastic).
        Raises NetfoldError on all of its ranks where it cannot be served.
        """
        timeout = timedelta(seconds=seconds_until(self._deadline))
        served: Store | None = None
        at: dict[str, Any] = {}
        if among.rank == 0:
            try:
                # torch itself would listen on every interface.
                listening = socket.create_server((_LOOPBACK, 0))
                at = {"port": listening.getsockname()[1]}
                served = TCPStore(
                    _LOOPBACK,
                    at["port"],
                    is_master=True,
                    wait_for_workers=False,
                    timeout=timeout,
                    master_listen_fd=listening.detach(),
                )
            except (OSError, RuntimeError) as error:
                at = {"problem": f"rank {self._group.rank} could not serve a store for NCCL on {_LOOPBACK}: {error}"}
        first, *_ = capability_exchange.exchange_messages(among, at, self._deadline)
        if "problem" in first:
            raise NetfoldError(first["problem"])
        return served or TCPStore(_LOOPBACK, first["port"], is_master=False, timeout=timeout)

    def _path(
        self,
        stream: Any,
        sums: IntraHostReducer,
        members: Sequence[int],
        peers: Sequence[int],
        name: str,
        watch: Group | None = None,
    ) -> tuple[IntraHostPath, str]:
        group, device_api, device = self._group, self._device_api, self._device
        between = among = None
        kinds = "all_reduce, all_gather and reduce_scatter" if sums.shares else "all_reduce"
        how = f"{kinds} from {MIN_BYTES} bytes by {name} among the {len(members)} ranks of a host"
        if len(peers) > 1:
            among = self._subgroup("between", peers)
            between = HostStaging(among, device_api, device, slots_of(among, device_api))
            how += f", by netfold between {len(peers)} hosts"
        without = sorted(str(dtype).removeprefix("torch.") for dtype in arithmetic.DTYPES - sums.dtypes)
        if without:
            how += f", but for {', '.join(without)}, for which {name} has no datatype"
        return IntraHostPath(group, device_api, stream, sums, between, among, watch), f"{how}; else "

    def _subgroup(self, what: str, ranks: Sequence[int]) -> Group:
        """Make a group of some of the ranks, over the group's own connections. Only one between hosts uses the switch.

        Raises RendezvousError.
        """
        group = self._group
        meeting = group.meeting(ranks, f"device {what}")
        switch = group.options.switch if what == "between" else None
        subgroup = Group(
            meeting,
            meeting.rank,
            meeting.size,
            options=replace(group.options, switch=switch or ""),  # None would be NETFOLD_SWITCH
            timeout_s=group.timeout_s,
            join_timeout_s=min(_JOIN_S, max(1.0, self._deadline - time.monotonic())),
        )
        self.parts.append(subgroup)
        return subgroup


def _shared_device(nodes: Sequence[int], uuids: Sequence[str]) -> str:
    """Name two ranks on one device, which NCCL does not support; empty if none. The same on all ranks."""
    seen: dict[tuple[int, str], int] = {}
    for rank, place in enumerate(zip(nodes, uuids, strict=True)):
        other = seen.setdefault(place, rank)
        if other != rank:
            return f"ranks {other} and {rank} are both on {uuids[rank]}"
    return ""
