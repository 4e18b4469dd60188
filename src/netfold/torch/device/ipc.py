"""Sums among the GPUs of one host that reach each other's memory (CUDA IPC).

Theory of operation. Every rank has a window: device memory that it exported, and that all others opened. A piece
of a tensor is summed in two steps, each behind a meeting of the host's ranks, before which every rank has seen its own
device done:

    scatter    all copy their values into their windows; meet; rank k folds shard k of all windows, in rank order, into
               its own window, where nobody else reads that shard before the next meeting
    gather     meet; all copy every shard from its owner's window

Windows have two halves, used in turn. A rank writes into a half that was last read two pieces ago; every rank has met
the others since, behind an event that comes after those reads. So no third meeting is needed.

A window is a lease, as a shared tensor is (ShmNode::begin_use in native/transport): it has an owner, its users are
counted, and the owner's memory is nobody else's before all of them have let go. The owner exports it once for each
user, since a counter of torch's counts one. A user lets go once its device is done with what it was given: at the end
of the group, or never, where the device does not come to an end. The owner writes into its window only as said above,
and nothing after a failure, so that a user that is behind may still read but never reads what is not of its group.
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
# Windows, own and others', that a device may still use which did not come to an end: for as long as the process lives.
_never_released: list[Tensor] = []


class IpcReducer:
    """See `netfold.torch.device.intra_host.IntraHostReducer`."""

    chunk_bytes = HALF_BYTES
    dtypes = arithmetic.DTYPES
    kernels_wait = False  # the host's ranks have met before each kernel

    def __init__(self, layer: DeviceApi, stream: Any, local: Group, windows: Sequence[Tensor]) -> None:
        """`local`: the host's ranks; `windows`: by their order there, this rank's own among them."""
        self._layer = layer
        self._stream = stream
        self._local = local
        self._windows = list(windows)
        self._half = 0

    def scatter(self, values: Tensor, reduce: str, deadline: float) -> Tensor:
        self._half = HALF_BYTES - self._half
        parts = self._parts(values)
        mine, (begin, end) = parts[self._local.rank], self._shard(values, self._local.rank)
        self._layer.launch(self._stream, lambda: mine.copy_(values))
        self._meet(deadline)
        shard = mine[begin:end]
        if len(shard):
            sources = [part[begin:end] for part in parts]
            self._layer.launch(self._stream, lambda: shard.copy_(arithmetic.reduce_in_order(sources, reduce)))
        return shard

    def gather(self, values: Tensor, deadline: float) -> None:
        self._meet(deadline)
        for rank, part in enumerate(self._parts(values)):
            begin, end = self._shard(values, rank)
            if begin < end:
                self._layer.copy(self._stream, values[begin:end], part[begin:end])

    def release(self, *, settled: bool) -> None:
        if not settled:
            _never_released.extend(self._windows)
        self._windows.clear()

    def _parts(self, values: Tensor) -> list[Tensor]:
        """Where each rank's values are in its window."""
        end = self._half + values.nbytes
        return [window[self._half : end].view(values.dtype) for window in self._windows]

    def _shard(self, values: Tensor, rank: int) -> tuple[int, int]:
        count = values.numel()
        each = -(-count // (self._local.size * BLOCK_ELEMENTS)) * BLOCK_ELEMENTS
        return min(count, rank * each), min(count, (rank + 1) * each)

    def _meet(self, deadline: float) -> None:
        wait_for(self._stream.record_event(), deadline, self._local.rank, "a copy among the GPUs of a host")
        self._local.wait(self._local.submit("barrier", timeout_s=seconds_until(deadline), wait_here=True))


def open_windows(
    group: Group, members: Sequence[int], layer: DeviceApi, stream: Any, device: torch.device, deadline: float
) -> tuple[list[Tensor], str]:
    """The windows of `members`, the ranks of this host, in this order; else the reason, on every rank of the group.

    It is tried, by each with each, by reading a mark there; all do it, or none.
    """
    mark, window, reason = secrets.token_bytes(_MARK_BYTES), None, ""
    handles: dict[int, dict[str, Any]] = {}  # by the rank that opens it
    try:
        staged = layer.pinned(_MARK_BYTES)
        window = layer.empty(stream, 2 * HALF_BYTES)
        staged.copy_(torch.frombuffer(bytearray(mark), dtype=torch.uint8))
        layer.copy(stream, window[:_MARK_BYTES], staged)
        wait_for(stream.record_event(), deadline, group.rank, "a mark in exported memory")
        for peer in members:
            if peer != group.rank:
                handles[peer] = layer.export(window)
    except RuntimeError as error:
        reason = f"rank {group.rank} cannot export memory of {layer.uuid(device)}: {_first_line(error)}"
    offer = {"handles": list(handles.items()), "mark": mark, "uuid": layer.uuid(device)}
    offers = exchange_messages(group, offer, deadline)
    windows = []
    for peer in members:
        offer = offers[peer]
        handle = dict(offer["handles"]).get(group.rank)
        if peer == group.rank and window is not None:
            windows.append(window)
        elif handle is not None and window is None:
            layer.decline(handle, device)
        elif handle is not None:
            try:
                opened = _open(layer, handle, device)
                layer.copy(stream, staged, opened[:_MARK_BYTES])
                wait_for(stream.record_event(), deadline, group.rank, "a mark in a peer's memory")
                if bytes(staged.tolist()) != offer["mark"]:
                    raise RuntimeError("what it finds there is something else")
                windows.append(opened)
            except RuntimeError as error:
                hidden = "" if offer["uuid"] in layer.visible() else ", which it does not see (CUDA_VISIBLE_DEVICES)"
                reason = reason or (
                    f"rank {group.rank} cannot open the memory of rank {peer} on {offer['uuid']}{hidden}: "
                    f"{_first_line(error)}"
                )
    refusals = [said for said in exchange_messages(group, reason[:2000], deadline) if said]
    return (windows, "") if not refusals else ([], refusals[0])


def _open(layer: DeviceApi, handle: dict[str, Any], device: torch.device) -> Tensor:
    try:
        return layer.open(handle, device)
    except RuntimeError:
        layer.decline(handle, device)
        raise


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
