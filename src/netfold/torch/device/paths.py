"""Which way a group's collectives go, found together when the first one comes, and the same on every rank."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from netfold.communicator import Group
from netfold.errors import NetfoldError
from netfold.torch.device import arithmetic, capability_exchange, ipc, pinned
from netfold.torch.device.device_api import DeviceApi, wait_for
from netfold.torch.device.host_staging import HostStaging
from netfold.torch.device.intra_host import MIN_BYTES, IntraHostPath, IntraHostReducer, NcclReducer, host_groups
from netfold.torch.store import TorchStore

log = logging.getLogger("netfold")

# For the groups of a part of the ranks to come together: everybody is there already.
_JOIN_S = 30.0
# A group that is closed waits as long as this for its own device, and then for the other ranks'.
SETTLE_S, MEET_S = 30.0, 10.0
AFTER_ABORT_S = 2.0


@dataclass
class DevicePaths:
    """`reason`: what all ranks found, in a sentence. `done`: the stream in which results are handed over."""

    device: torch.device
    staged: HostStaging
    inside: IntraHostPath | None
    done: Any
    reason: str
    parts: list[Any] = field(default_factory=list)

    def abort(self, reason: str) -> None:
        """Who waits for this rank in one of the parts hears the reason."""
        for part in self.parts:
            with contextlib.suppress(RuntimeError):  # NCCL's, of a device that is gone: what failed first is told
                part.abort(reason)

    def close(self, *, failed: bool, meet_s: float) -> None:
        """Free what the ways are made of, on the driver's thread. Idempotent.

        What was handed over as the result of an operation comes first: the host waits until the device is done with
        what it was given, for `SETTLE_S` at most, and for the other ranks' devices for `meet_s`. Only after a failure
        is anything cut off.
        """
        settled = not failed and (self.inside is None or self._settle(self.inside, SETTLE_S))
        if not settled and not failed:
            log.warning("the device was not done %g s after its group was closed; it is cut off", SETTLE_S)
        if not settled:
            self.abort("the group was closed")
        if self.inside is not None:
            self.inside.release(settled=settled or self._settle(self.inside, AFTER_ABORT_S))
        parts, self.parts = self.parts, []
        # Groups last: ranks that wait in one hear that this rank has left.
        for part in sorted(parts, key=lambda each: isinstance(each, Group)):
            if isinstance(part, Group):
                part.close()
            elif settled:
                part.close(meet_s)

    def _settle(self, inside: IntraHostPath, wait_s: float) -> bool:
        """Whether the device came to the end of what it was given."""
        deadline = time.monotonic() + wait_s
        try:
            for stream in (self.staged.out, self.staged.back, self.done, *inside.streams):
                wait_for(stream.record_event(), deadline, 0, "the end of a group")
        except RuntimeError:
            return False
        return True


def choose_paths(group: Group, layer: DeviceApi, device: torch.device, part: Store, deadline: float) -> DevicePaths:
    """A collective: the first thing that a group's driver sends. Raises what `meeting.meet` does."""
    slots: list[torch.Tensor] = []
    problem = ""
    try:
        slots = pinned.slots(layer, int(group.options.pinned_bytes or 0), group.rank)
    except NetfoldError as error:
        problem = str(error)
    facts = capability_exchange.exchange_capabilities(
        group, capability_exchange.capabilities_of(group, layer, device, problem), deadline
    )
    made = _Made(group, layer, device, part, deadline)
    try:
        inside, how = made.inside([each.uuid for each in facts])
    except BaseException:
        for each in made.parts:
            if isinstance(each, Group):
                each.close()
            else:
                each.abort("the group was not made")
        raise
    found = made.ways(slots, inside, how)
    could = group.options.intra_host == "auto" and len(set(group.nodes)) < group.size
    level = logging.WARNING if could and inside is None and group.rank == 0 else logging.DEBUG
    log.log(level, "rank %d of %d: %s", group.rank, group.size, found.reason)
    return found


class _Made:
    """What is made while the ways are found: groups of a part of the ranks."""

    def __init__(self, group: Group, layer: DeviceApi, device: torch.device, part: Store, deadline: float) -> None:
        self._group = group
        self._layer = layer
        self._device = device
        self._part = part
        self._deadline = deadline
        self.parts: list[Any] = []

    def ways(self, slots: Sequence[torch.Tensor], inside: IntraHostPath | None, how: str) -> DevicePaths:
        layer, device = self._layer, self._device
        reason = f"{layer.kind}: {how}staged through {len(slots)} x {slots[0].numel()} bytes of pinned memory"
        return DevicePaths(
            device, HostStaging(self._group, layer, device, slots), inside, layer.new_stream(device), reason, self.parts
        )

    def inside(self, uuids: Sequence[str]) -> tuple[IntraHostPath | None, str]:
        """The way inside hosts, and what is to be said of it."""
        group, word = self._group, str(self._group.options.intra_host)
        members, peers, reason = host_groups(group.nodes, group.rank)
        if word == "nccl":
            reason = reason or _twice(group.nodes, uuids)
            if reason:
                raise ValueError(f"NETFOLD_INTRA_HOST=nccl cannot be done: {reason}; auto does without")
            return self._by_nccl(members, peers)
        if word == "off":
            reason = "NETFOLD_INTRA_HOST=off"
        stream = self._layer.new_stream(self._device)
        windows: list[torch.Tensor] = []
        if not reason:
            windows, reason = ipc.open_windows(group, members, self._layer, stream, self._device, self._deadline)
        if reason:
            return None, f"IPC disabled because {reason}; "
        local = group if len(members) == group.size else self._of("host", group.nodes[group.rank], members)
        return self._way(stream, ipc.IpcReducer(self._layer, stream, local, windows), members, peers, "IPC")

    def _by_nccl(self, members: Sequence[int], peers: Sequence[int]) -> tuple[IntraHostPath | None, str]:
        store = PrefixStore(f"nccl/{members[0]}", self._part)
        place = members.index(self._group.rank)
        nccl = self._layer.nccl(self._device, store, place, len(members))
        self.parts.append(nccl)
        stream = self._layer.new_stream(self._device)
        sums = NcclReducer(self._layer, stream, nccl, len(members))
        return self._way(stream, sums, members, peers, "NCCL", self._of("watch", members[0], members))

    def _way(
        self,
        stream: Any,
        sums: IntraHostReducer,
        members: Sequence[int],
        peers: Sequence[int],
        name: str,
        watch: Group | None = None,
    ) -> tuple[IntraHostPath, str]:
        group, layer, device = self._group, self._layer, self._device
        between = None
        how = f"all_reduce from {MIN_BYTES} bytes by {name} among the {len(members)} ranks of a host"
        if len(peers) > 1:
            among = self._of("between", members.index(group.rank), peers)
            slots = pinned.slots(layer, int(group.options.pinned_bytes or 0), group.rank)
            between = HostStaging(among, layer, device, slots)
            how += f", by netfold between {len(peers)} hosts"
        without = sorted(str(dtype).removeprefix("torch.") for dtype in arithmetic.DTYPES - sums.dtypes)
        if without:
            how += f", but for {', '.join(without)}, for which {name} has no datatype"
        return IntraHostPath(group, layer, stream, sums, between, watch), f"{how}; else "

    def _of(self, what: str, number: int, ranks: Sequence[int]) -> Group:
        """A group of some of the ranks. Inside a host there is nothing for a switch to do."""
        group = self._group
        switch = group.options.switch if what == "between" else None
        made = Group(
            TorchStore(PrefixStore(f"{what}/{number}", self._part)),
            list(ranks).index(group.rank),
            len(ranks),
            options=replace(group.options, switch=switch or ""),  # None would be NETFOLD_SWITCH
            timeout_s=group.timeout_s,
            join_timeout_s=min(_JOIN_S, max(1.0, self._deadline - time.monotonic())),
        )
        self.parts.append(made)
        return made


def _twice(nodes: Sequence[int], uuids: Sequence[str]) -> str:
    """NCCL takes one rank a device; found alike by all ranks, whichever host it is."""
    seen: dict[tuple[int, str], int] = {}
    for rank, place in enumerate(zip(nodes, uuids, strict=True)):
        other = seen.setdefault(place, rank)
        if other != rank:
            return f"ranks {other} and {rank} are both on {uuids[rank]}"
    return ""
