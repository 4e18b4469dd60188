"""Sums among the GPUs of one host that reach each other's memory (CUDA IPC).

Theory of operation. Every rank has a window: device memory that it exported and that the other ranks opened. A window
has `SLOTS` slots, which the chunks of all calls use in turn. A chunk is shared in one step: every rank copies its
values into its window, waits for its own device, and passes a barrier of the host's ranks. Then all may read them.

    all_reduce       share; rank k reduces shard k of all windows, in rank order, into its own window, where no other
                     rank reads that shard before the next barrier; barrier; all copy each shard from its owner's window
    all_gather       share; all copy every rank's values
    reduce_scatter   share what all ranks are to receive; each rank reduces its own part of all windows

At most two chunks are under way, and they end in the order in which they began. So no rank writes into a slot that
another rank still reads: it last read there `SLOTS` chunks ago. The chunk after that one has ended, so every rank has
passed a barrier since, after an event that follows those reads.

A window is a lease, like a shared tensor (ShmNode::begin_use in core/native/transport). It has an owner and counted
users, and the owner's memory is not reused until all users have released it. The owner exports the window once for each
user, since one of torch's counters counts one user. A user releases the window once its device has finished: at the end
of the group, or never if the device hangs. The owner writes into its window only as described above, and not after a
failure. So a slow user may still read, but never reads memory from outside of the group.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import torch

from netfold.communicator import Group
from netfold.errors import Mismatch
from netfold.torch.device import arithmetic
from netfold.torch.device.capability_exchange import exchange_messages, exchange_texts
from netfold.torch.device.chunks import BLOCK_ELEMENTS
from netfold.torch.device.device_api import DeviceApi, wait_for
from netfold.torch.device.host_staging import seconds_until

Tensor = torch.Tensor

# Two chunks under way, and one more, so that two barriers lie between the reads of a slot and the next writes.
SLOTS = 3
# A chunk's sums, and one between hosts, take about a millisecond. Not measured.
SLOT_BYTES = 8 << 20
# Values in a slot begin at cache lines of the GPU.
_ALIGN_BYTES = 128
_SIGNATURE_BYTES = 128
_MARK_BYTES = 16
# Windows, own and other ranks', that a hanging device may still use: kept until the process ends.
_never_released: list[Tensor] = []


class IpcReducer:
    """See `netfold.torch.device.intra_host.IntraHostReducer`."""

    dtypes = arithmetic.DTYPES
    kernels_wait = False  # the host's ranks pass a barrier before each kernel
    shares = True

    def __init__(self, device_api: DeviceApi, stream: Any, local: Group, windows: Sequence[Tensor]) -> None:
        """local: the group of the host's ranks. windows: by rank in `local`, this rank's own included."""
        self._device_api = device_api
        self._stream = stream
        self._local = local
        self._windows = list(windows)
        self._signature = ""
        self.chunk_bytes = SLOT_BYTES

    def announce(self, signature: str) -> None:
        """The next barrier compares `signature` of all ranks."""
        self._signature = signature

    def share(self, values: Sequence[Tensor], slot: int, deadline: float) -> list[list[Tensor]]:
        """Copy `values` into a slot of this rank's window. Returns each rank's values, in the ranks' windows."""
        shared: list[list[Tensor]] = [[] for _ in self._windows]
        begin = slot * SLOT_BYTES
        for value in values:
            end = begin + value.nbytes
            for window, parts in zip(self._windows, shared, strict=True):
                parts.append(window[begin:end].view(value.dtype))
            self._device_api.copy(self._stream, shared[self._local.rank][-1], value)
            begin = -(-end // _ALIGN_BYTES) * _ALIGN_BYTES
        assert begin <= (slot + 1) * SLOT_BYTES, "a chunk is larger than a slot"
        self._barrier(deadline)
        return shared

    def reduce_part(self, shared: Sequence[Sequence[Tensor]], part: int, operator: arithmetic.Operator) -> Tensor:
        """Reduce part `part` of all ranks' values, in rank order, into this rank's window. Returns it there."""
        sources = [parts[part] for parts in shared]
        result = sources[self._local.rank]
        self._device_api.launch(self._stream, lambda: result.copy_(arithmetic.reduce_in_order(sources, operator)))
        return result

    def scatter(self, values: Tensor, operator: arithmetic.Operator, slot: int, deadline: float) -> Tensor:
        shared = self.share([values], slot, deadline)
        begin, end = self._shard(values, self._local.rank)
        shards = [[whole[begin:end]] for (whole,) in shared]
        return self.reduce_part(shards, 0, operator) if begin < end else values[:0]

    def gather(self, values: Tensor, slot: int, deadline: float) -> None:
        self._barrier(deadline)
        at = slot * SLOT_BYTES
        for rank, window in enumerate(self._windows):
            begin, end = self._shard(values, rank)
            if begin < end:
                whole = window[at : at + values.nbytes].view(values.dtype)
                self._device_api.copy(self._stream, values[begin:end], whole[begin:end])

    def release(self, *, settled: bool) -> None:
        if not settled:
            _never_released.extend(self._windows)
        self._device_api.close(self._stream, self._windows)

    def _shard(self, values: Tensor, rank: int) -> tuple[int, int]:
        count = values.numel()
        each = -(-count // (self._local.size * BLOCK_ELEMENTS)) * BLOCK_ELEMENTS
        return min(count, rank * each), min(count, (rank + 1) * each)

    def _barrier(self, deadline: float) -> None:
        """Wait for this rank's device, then for all ranks. Raises Mismatch if the ranks' calls differ."""
        wait_for(self._stream.record_event(), deadline, self._local.rank, "a copy among the GPUs of a host")
        if not self._signature:
            self._local.wait(self._local.submit("barrier", timeout_s=seconds_until(deadline), wait_here=True))
            return
        # In place of the barrier: it completes only after all ranks have come.
        signatures = exchange_texts(self._local, self._signature, _SIGNATURE_BYTES, deadline)
        for rank, other in enumerate(signatures):
            if other != signatures[self._local.rank]:
                raise Mismatch(
                    f"rank {self._local.rank} of this host calls {self._signature}, rank {rank} calls {other}; all "
                    "ranks must make the same calls in the same order",
                    rank=rank,
                )
        self._signature = ""


def open_windows(
    group: Group, members: Sequence[int], device_api: DeviceApi, stream: Any, device: torch.device, deadline: float
) -> tuple[list[Tensor], str]:
    """Open the windows of `members`, the ranks of this host, in this order. Collective over the group.

    Each rank tests each window by reading a random mark. If any rank fails, all ranks return no windows and the reason.
    """
    mark, window, reason = secrets.token_bytes(_MARK_BYTES), None, ""
    handles: dict[int, dict[str, Any]] = {}  # by the rank that opens it
    try:
        staged = device_api.pinned(_MARK_BYTES)
        window = device_api.empty(stream, SLOTS * SLOT_BYTES)
        staged.copy_(torch.frombuffer(bytearray(mark), dtype=torch.uint8))
        device_api.copy(stream, window[:_MARK_BYTES], staged)
        wait_for(stream.record_event(), deadline, group.rank, "a mark in exported memory")
        for peer in members:
            if peer != group.rank:
                handles[peer] = device_api.export(stream, window)
    except RuntimeError as error:
        reason = f"rank {group.rank} cannot export memory of {device_api.uuid(device)}: {_first_line(error)}"
    offer = {"handles": list(handles.items()), "mark": mark, "uuid": device_api.uuid(device)}
    offers = exchange_messages(group, offer, deadline)
    windows: list[Tensor] = []
    for peer in members:
        offer = offers[peer]
        handle = dict(offer["handles"]).get(group.rank)
        if peer == group.rank and window is not None:
            windows.append(window)
        elif handle is not None and window is None:
            device_api.decline(handle, device)
        elif handle is not None:
            try:
                windows.append(_open(device_api, handle, device))
                device_api.copy(stream, staged, windows[-1][:_MARK_BYTES])
                wait_for(stream.record_event(), deadline, group.rank, "a mark in a peer's memory")
                if bytes(staged.tolist()) != offer["mark"]:
                    raise RuntimeError("the mark read there is a different one")
            except RuntimeError as error:
                hidden = (
                    "" if offer["uuid"] in device_api.visible() else ", which it does not see (CUDA_VISIBLE_DEVICES)"
                )
                reason = reason or (
                    f"rank {group.rank} cannot open the memory of rank {peer} on {offer['uuid']}{hidden}: "
                    f"{_first_line(error)}"
                )
    reasons = [each for each in exchange_messages(group, reason[:2000], deadline) if each]
    if reasons:
        device_api.close(stream, windows)
        return [], reasons[0]
    return windows, ""


def _open(device_api: DeviceApi, handle: dict[str, Any], device: torch.device) -> Tensor:
    try:
        return device_api.open(handle, device)
    except RuntimeError:
        device_api.decline(handle, device)
        raise


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
