"""Sums among the GPUs of one host that reach each other's memory (CUDA IPC).

Theory of operation. Every rank has a window: device memory that it exported and that the other ranks opened. A chunk
of a tensor is reduced in two steps, each after a barrier of the host's ranks. Before the barrier every rank waits for
its own device:

    scatter    all ranks copy their values into their windows; barrier; rank k reduces shard k of all windows, in rank
               order, into its own window; no other rank reads that shard before the next barrier
    gather     barrier; all ranks copy every shard from its owner's window

A window has two halves, which alternate. A rank writes into a half that was last read two chunks ago. Since then every
rank has passed a barrier, after an event that follows those reads. So no third barrier is needed.

A window is a lease, like a shared tensor (ShmNode::begin_use in native/transport). It has an owner and counted users,
and the owner's memory is not reused until all users have released it. The owner exports the window once for each user,
since one of torch's counters counts one user. A user releases the window once its device has finished: at the end of
the group, or never if the device hangs. The owner writes into its window only as described above, and not after a
failure. So a slow user may still read, but never reads memory from outside of the group.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import torch

from netfold.communicator import Group
from netfold.torch.device import arithmetic
from netfold.torch.device.capability_exchange import exchange_messages
from netfold.torch.device.chunks import BLOCK_ELEMENTS
from netfold.torch.device.device_api import DeviceApi, wait_for
from netfold.torch.device.host_staging import seconds_until

Tensor = torch.Tensor

# One half of a window.
HALF_BYTES = 16 << 20
_MARK_BYTES = 16
# Windows, own and other ranks', that a hanging device may still use: kept until the process ends.
_never_released: list[Tensor] = []


class IpcReducer:
    """See `netfold.torch.device.intra_host.IntraHostReducer`."""

    chunk_bytes = HALF_BYTES
    dtypes = arithmetic.DTYPES
    kernels_wait = False  # the host's ranks pass a barrier before each kernel

    def __init__(self, device_api: DeviceApi, stream: Any, local: Group, windows: Sequence[Tensor]) -> None:
        """local: the group of the host's ranks. windows: by rank in `local`, this rank's own included."""
        self._device_api = device_api
        self._stream = stream
        self._local = local
        self._windows = list(windows)
        self._half = 0

    def scatter(self, values: Tensor, reduce: str, deadline: float) -> Tensor:
        self._half = HALF_BYTES - self._half
        parts = self._parts(values)
        mine, (begin, end) = parts[self._local.rank], self._shard(values, self._local.rank)
        self._device_api.launch(self._stream, lambda: mine.copy_(values))
        self._barrier(deadline)
        shard = mine[begin:end]
        if len(shard):
            sources = [part[begin:end] for part in parts]
            self._device_api.launch(self._stream, lambda: shard.copy_(arithmetic.reduce_in_order(sources, reduce)))
        return shard

    def gather(self, values: Tensor, deadline: float) -> None:
        self._barrier(deadline)
        for rank, part in enumerate(self._parts(values)):
            begin, end = self._shard(values, rank)
            if begin < end:
                self._device_api.copy(self._stream, values[begin:end], part[begin:end])

    def release(self, *, settled: bool) -> None:
        if not settled:
            _never_released.extend(self._windows)
        self._windows.clear()

    def _parts(self, values: Tensor) -> list[Tensor]:
        """The region of each rank's values in its window."""
        end = self._half + values.nbytes
        return [window[self._half : end].view(values.dtype) for window in self._windows]

    def _shard(self, values: Tensor, rank: int) -> tuple[int, int]:
        count = values.numel()
        each = -(-count // (self._local.size * BLOCK_ELEMENTS)) * BLOCK_ELEMENTS
        return min(count, rank * each), min(count, (rank + 1) * each)

    def _barrier(self, deadline: float) -> None:
        wait_for(self._stream.record_event(), deadline, self._local.rank, "a copy among the GPUs of a host")
        self._local.wait(self._local.submit("barrier", timeout_s=seconds_until(deadline), wait_here=True))


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
        window = device_api.empty(stream, 2 * HALF_BYTES)
        staged.copy_(torch.frombuffer(bytearray(mark), dtype=torch.uint8))
        device_api.copy(stream, window[:_MARK_BYTES], staged)
        wait_for(stream.record_event(), deadline, group.rank, "a mark in exported memory")
        for peer in members:
            if peer != group.rank:
                handles[peer] = device_api.export(window)
    except RuntimeError as error:
        reason = f"rank {group.rank} cannot export memory of {device_api.uuid(device)}: {_first_line(error)}"
    offer = {"handles": list(handles.items()), "mark": mark, "uuid": device_api.uuid(device)}
    offers = exchange_messages(group, offer, deadline)
    windows = []
    for peer in members:
        offer = offers[peer]
        handle = dict(offer["handles"]).get(group.rank)
        if peer == group.rank and window is not None:
            windows.append(window)
        elif handle is not None and window is None:
            device_api.decline(handle, device)
        elif handle is not None:
            try:
                opened = _open(device_api, handle, device)
                device_api.copy(stream, staged, opened[:_MARK_BYTES])
                wait_for(stream.record_event(), deadline, group.rank, "a mark in a peer's memory")
                if bytes(staged.tolist()) != offer["mark"]:
                    raise RuntimeError("the mark read there is a different one")
                windows.append(opened)
            except RuntimeError as error:
                hidden = (
                    "" if offer["uuid"] in device_api.visible() else ", which it does not see (CUDA_VISIBLE_DEVICES)"
                )
                reason = reason or (
                    f"rank {group.rank} cannot open the memory of rank {peer} on {offer['uuid']}{hidden}: "
                    f"{_first_line(error)}"
                )
    reasons = [each for each in exchange_messages(group, reason[:2000], deadline) if each]
    return (windows, "") if not reasons else ([], reasons[0])


def _open(device_api: DeviceApi, handle: dict[str, Any], device: torch.device) -> Tensor:
    try:
        return device_api.open(handle, device)
    except RuntimeError:
        device_api.decline(handle, device)
        raise


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
