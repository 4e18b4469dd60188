"""Collectives through pinned host memory: while one piece is in the collective, the next is on its way out of the
device and the one before on its way back, each by a copy engine of its own.

Theory of operation. A slot is a pinned buffer for one piece. A piece goes through three stages:

    leaving    copied out on the stream `out`, which waits for the caller's stream and for the slot's last way back
    running    the native collective; submitted once the host has seen the copy done
    returned   copied in on the stream `back`; its event frees the slot

One thread drives it. Pieces leave, run and return in one order, the same on every rank, which is what the native group
asks of its callers. Results may be read by whoever waits for the event after the last piece's return.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from netfold.communicator import Group
from netfold.torch.calls import Prepared
from netfold.torch.device.chunks import Chunk, chunk_elements, count_chunks, split_into_chunks
from netfold.torch.device.device_api import DeviceApi, Event, wait_for
from netfold.torch.device.pinned import ALIGN_BYTES

Tensor = torch.Tensor

# Places that results were copied to are looked through when there are more.
_MAX_LANDING = 256


@dataclass(eq=False)
class Slot:
    memory: Tensor
    free: Event | None = None


@dataclass(eq=False)
class StagedChunk:
    """A piece on its way."""

    call: Prepared
    chunk: Chunk
    slot: Slot
    deadline: float
    left: Event | None
    returned: Callable[[Event], None] | None
    operation: Any = None


class HostStaging:
    """One group's way through the host for one device. Not thread-safe."""

    def __init__(self, group: Group, layer: DeviceApi, device: torch.device, slots: Iterable[Tensor]) -> None:
        self._group = group
        self._layer = layer
        self._device = device
        self.out = layer.new_stream(device)
        self.back = layer.new_stream(device)
        self._slots = collections.deque(Slot(memory) for memory in slots)
        self._slot_bytes = self._slots[0].memory.numel()
        self._leaving: collections.deque[StagedChunk] = collections.deque()
        self._running: collections.deque[StagedChunk] = collections.deque()
        # Memory that pieces under way will write, and that which copies to the device may not have reached yet: who
        # reads either must come after.
        self._written: collections.Counter[int] = collections.Counter()
        self._landing: dict[int, Event] = {}

    @property
    def busy(self) -> bool:
        return bool(self._leaving or self._running)

    def begin(self, call: Prepared, ready: Event, deadline: float, returned: Callable[[Event], None]) -> None:
        """Send a call's pieces on their way; `ready`: when its tensors hold their values. `returned` is called, by
        `step` at the latest, with the event after which the results are in place."""
        some = [*call.inputs, *call.outputs]
        elements = chunk_elements(call, self._group.size, self._slot_bytes)
        count = count_chunks(call, elements)
        if call.kind == "all_to_all":
            self.drain()  # what is submitted must come in one order
            count = self._greatest(count, deadline)
        elif any(_place(tensor) in self._written for tensor in some):
            self.drain()
        for tensor in some:
            landing = self._landing.get(_place(tensor))
            if landing is not None:
                self.out.wait_event(landing)
        self.out.wait_event(ready)
        self.back.wait_event(ready)
        for tensor in some:
            self._layer.keep(tensor, self.out)
            self._layer.keep(tensor, self.back)
        for number, piece in enumerate(split_into_chunks(call, self._group.rank, elements, count)):
            self._leave(call, piece, deadline, returned if number == count - 1 else None)

    def step(self) -> None:
        """Take the oldest piece one stage further."""
        if self._running:
            self._return(self._running.popleft())
        elif self._leaving:
            self._run(self._leaving.popleft())

    def drain(self) -> None:
        """Have all pieces on their way back; the host does not wait until they are there."""
        while self._leaving:
            self._run(self._leaving.popleft())
        while self._running:
            self._return(self._running.popleft())

    def forget(self) -> None:
        """After a failure: nothing that is under way matters any more."""
        self._leaving.clear()
        self._running.clear()

    def _leave(self, call: Prepared, piece: Chunk, deadline: float, returned: Callable[[Event], None] | None) -> None:
        slot = self._slots.popleft()  # there is one: of three pieces, one has returned
        if slot.free is not None and piece.out:
            self.out.wait_event(slot.free)
        regions = _regions(slot.memory, piece)
        for tensor in piece.out:
            self._layer.copy(self.out, regions[id(tensor)], tensor)
        left = self.out.record_event() if piece.out else None
        for tensor in piece.back:
            self._written[_place(tensor)] += 1
        self._leaving.append(StagedChunk(call, piece, slot, deadline, left, returned))
        if len(self._leaving) > 1:
            self._run(self._leaving.popleft())
        if len(self._running) > 1:
            self._return(self._running.popleft())

    def _run(self, passage: StagedChunk) -> None:
        call, rank = passage.call, self._group.rank
        # The collective writes where the last piece of this slot is read from.
        for event, what in ((passage.slot.free, "the copy to the device"), (passage.left, "the copy to the host")):
            if event is not None:
                wait_for(event, passage.deadline, rank, f"{call.kind}: {what}")
        regions = _regions(passage.slot.memory, passage.chunk)
        passage.operation = self._group.submit(
            call.kind,
            dtype=call.dtype,
            reduce=call.reduce,
            average=call.average,
            root=call.root,
            inputs=[_region(regions[id(tensor)]) for tensor in passage.chunk.inputs],
            outputs=[_region(regions[id(tensor)]) for tensor in passage.chunk.outputs],
            timeout_s=seconds_until(passage.deadline),
            wait_here=False,
        )
        self._running.append(passage)

    def _return(self, passage: StagedChunk) -> None:
        self._group.wait(passage.operation)
        regions = _regions(passage.slot.memory, passage.chunk)
        for tensor in passage.chunk.back:
            self._layer.copy(self.back, tensor, regions[id(tensor)])
            place = _place(tensor)
            self._written[place] -= 1
            if not self._written[place]:
                del self._written[place]
        passage.slot.free = self.back.record_event() if passage.chunk.back else None
        if passage.slot.free is not None:
            self.copy_back(passage.chunk.back, passage.slot.free)
        self._slots.append(passage.slot)
        if passage.returned is not None:
            passage.returned(self.back.record_event())

    def copy_back(self, tensors: Iterable[Tensor], event: Event) -> None:
        """Calls that come later and read these will do so behind `event`."""
        if len(self._landing) > _MAX_LANDING:
            self._landing = {place: each for place, each in self._landing.items() if not each.query()}
        for tensor in tensors:
            self._landing[_place(tensor)] = event

    def _greatest(self, count: int, deadline: float) -> int:
        number = torch.tensor([count])
        operation = self._group.submit(
            "all_reduce",
            dtype="i64",
            reduce="max",
            outputs=[_region(number)],
            timeout_s=seconds_until(deadline),
            wait_here=True,
        )
        self._group.wait(operation)
        return int(number)


def seconds_until(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _regions(memory: Tensor, piece: Chunk) -> dict[int, Tensor]:
    """Where each tensor of a piece lies in its slot."""
    regions, at = {}, 0
    for tensor in (*piece.inputs, *piece.outputs):
        regions[id(tensor)] = memory[at : at + tensor.numel()]
        at += -(-tensor.numel() // ALIGN_BYTES) * ALIGN_BYTES
    return regions


def _region(memory: Tensor) -> tuple[int, int]:
    return memory.data_ptr(), memory.nbytes


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
