"""Collectives through pinned host memory, in a pipeline of chunks.

While one chunk is in the collective, one copy engine copies the next chunk from the device, and another copies the
previous chunk back.

Theory of operation. A slot is a pinned buffer for one chunk. A chunk goes through three stages:

    leaving    copied out on the stream `out`, which waits for the caller's stream and for the slot's last copy back
    running    the native collective; submitted once the host has seen the copy done
    returned   copied in on the stream `back`; its event frees the slot

One thread drives the pipeline. Chunks leave, run and return in the same order on every rank, as the native group
requires. The results are complete after the event that follows the last chunk's return.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from netfold.communicator import Group
from netfold.torch.calls import Prepared
from netfold.torch.device.chunks import Chunk, chunk_elements, count_chunks, split_into_chunks
from netfold.torch.device.device_api import DeviceApi, Event, wait_for
from netfold.torch.device.pinned import ALIGN_BYTES, Slots

Tensor = torch.Tensor

# With more results than this, remove those whose copies are done.
_MAX_LANDING = 256

Bytes = tuple[int, int]  # the first address, and the one after the last


@dataclass(eq=False)
class Slot:
    memory: Tensor
    free: Event | None = None


@dataclass(eq=False)
class StagedChunk:
    """A chunk in the pipeline."""

    call: Prepared
    chunk: Chunk
    slot: Slot
    regions: dict[int, Tensor]  # of the slot, by the id of the chunk's tensors
    deadline: float
    left: Event | None
    returned: Callable[[Event], None] | None
    operation: Any = None


@dataclass(frozen=True, eq=False)
class _Landing:
    """Bytes that the device may use until `event`, which is in `stream`."""

    bytes: Bytes
    event: Event
    stream: Any


class HostStaging:
    """The pipeline of one group and one device. Not thread-safe."""

    def __init__(self, group: Group, device_api: DeviceApi, device: torch.device, slots: Slots) -> None:
        self._group = group
        self._device_api = device_api
        self._device = device
        self.out = device_api.new_stream(device)
        self.back = device_api.new_stream(device)
        self.memory = slots
        self._slots = collections.deque(Slot(memory) for memory in slots.memory)
        self._slot_bytes = self._slots[0].memory.numel()
        self._leaving: collections.deque[StagedChunk] = collections.deque()
        self._running: collections.deque[StagedChunk] = collections.deque()
        # Memory that chunks under way will write, and memory that the device may still write or read for a call whose
        # chunks are all done. Later calls on overlapping bytes wait for both.
        self._written: collections.Counter[Bytes] = collections.Counter()
        self._landing: list[_Landing] = []

    def elements_a_slot(self, call: Prepared) -> int:
        """The number of elements of each tensor of `call` that one slot takes."""
        return chunk_elements(call, self._group.size, self._slot_bytes)

    @property
    def busy(self) -> bool:
        return bool(self._leaving or self._running)

    def begin(self, call: Prepared, ready: Event, deadline: float, returned: Callable[[Event], None]) -> None:
        """Start a call's chunks.

        ready: the event after which the tensors hold their values.
        returned: called, by `step` at the latest, with the event after which the results are in place.
        """
        some = [*call.inputs, *call.outputs]
        elements = chunk_elements(call, self._group.size, self._slot_bytes)
        count = count_chunks(call, elements)
        if call.kind == "all_to_all":
            self.drain()  # all ranks must submit in one order
            count = self._greatest(count, deadline)
        elif any(_overlap(bytes_of(tensor), each) for tensor in some for each in self._written):
            self.drain()
        for event in (*self.events_on(some), ready):
            self.out.wait_event(event)
            self.back.wait_event(event)
        for tensor in some:
            self._device_api.keep(tensor, self.out)
            self._device_api.keep(tensor, self.back)
        for number, piece in enumerate(split_into_chunks(call, self._group.rank, elements, count)):
            self._leave(call, piece, deadline, returned if number == count - 1 else None)

    def step(self) -> None:
        """Move the oldest chunk to its next stage."""
        if self._running:
            self._return(self._running.popleft())
        elif self._leaving:
            self._run(self._leaving.popleft())

    def start(self) -> None:
        """Submit the collectives of all chunks that have begun. Waits for their copies to the host."""
        while self._leaving:
            self._run(self._leaving.popleft())

    def between_steps(self, call: Prepared, stream: Any, deadline: float) -> Iterator[None]:
        """Run a call after the stream's work so far, and before its later work. Yields once, while it is on the way."""
        returned: list[Event] = []
        self.begin(call, stream.record_event(), deadline, returned.append)
        self.start()
        yield
        while not returned:
            self.step()
        stream.wait_event(returned[0])

    def drain(self) -> None:
        """Run all chunks until their copies back are submitted. Does not wait for these copies."""
        while self._leaving:
            self._run(self._leaving.popleft())
        while self._running:
            self._return(self._running.popleft())

    def forget(self) -> None:
        """Drop all chunks under way, after a failure."""
        self._leaving.clear()
        self._running.clear()

    def _leave(self, call: Prepared, piece: Chunk, deadline: float, returned: Callable[[Event], None] | None) -> None:
        slot = self._slots.popleft()  # never empty: of three chunks, one has returned
        if slot.free is not None and piece.out:
            self.out.wait_event(slot.free)
        regions = _regions(slot.memory, piece)
        left = None
        if piece.out:
            self._device_api.copy_all(self.out, [regions[id(tensor)] for tensor in piece.out], piece.out)
            left = self.out.record_event()
        for tensor in piece.back:
            self._written[bytes_of(tensor)] += 1
        self._leaving.append(StagedChunk(call, piece, slot, regions, deadline, left, returned))
        if len(self._leaving) > 1:
            self._run(self._leaving.popleft())
        if len(self._running) > 1:
            self._return(self._running.popleft())

    def _run(self, passage: StagedChunk) -> None:
        call, rank = passage.call, self._group.rank
        # The collective overwrites the slot, so the copy back of the slot's previous chunk must be done, too.
        for event, what in ((passage.slot.free, "the copy to the device"), (passage.left, "the copy to the host")):
            if event is not None:
                wait_for(event, passage.deadline, rank, f"{call.kind}: {what}")
        regions = passage.regions
        in_slot = replace(
            call,
            inputs=[regions[id(tensor)] for tensor in passage.chunk.inputs],
            outputs=[regions[id(tensor)] for tensor in passage.chunk.outputs],
        )
        passage.operation = in_slot.submit(self._group, seconds_until(passage.deadline), wait_here=False)
        self._running.append(passage)

    def _return(self, passage: StagedChunk) -> None:
        self._group.wait(passage.operation)
        back = passage.chunk.back
        for tensor in back:
            place = bytes_of(tensor)
            self._written[place] -= 1
            if not self._written[place]:
                del self._written[place]
        passage.slot.free = None
        if back:
            self._device_api.copy_all(self.back, back, [passage.regions[id(tensor)] for tensor in back])
            passage.slot.free = self.back.record_event()
            self.in_use(back, passage.slot.free, self.back)
        self._slots.append(passage.slot)
        if passage.returned is not None:
            passage.returned(self.back.record_event())

    def in_use(self, tensors: Iterable[Tensor], event: Event, stream: Any) -> None:
        """Have later calls on these tensors' bytes wait for `event`, recorded last in `stream`.

        The work before the event must come after all earlier events of the same bytes.
        """
        if len(self._landing) > _MAX_LANDING:
            self._landing = [each for each in self._landing if not each.event.query()]
        for tensor in tensors:
            begin, end = bytes_of(tensor)
            if begin == end:
                continue
            # The chunk before: the stream has passed it once it passes this event.
            begin = min(
                (each.bytes[0] for each in self._landing if each.stream is stream and each.bytes[1] == begin),
                default=begin,
            )
            # The new event comes after those of all bytes in its range.
            kept = [each for each in self._landing if each.bytes[0] < begin or end < each.bytes[1]]
            self._landing = [*kept, _Landing((begin, end), event, stream)]

    def events_on(self, tensors: Sequence[Tensor]) -> list[Event]:
        """The events that a later use of the tensors' bytes must wait for."""
        places = [bytes_of(tensor) for tensor in tensors]
        return [each.event for each in self._landing if any(_overlap(place, each.bytes) for place in places)]

    def _greatest(self, count: int, deadline: float) -> int:
        number = torch.tensor([count])
        call = Prepared("all_reduce", dtype="i64", reduce="max", outputs=[number])
        self._group.wait(call.submit(self._group, seconds_until(deadline), wait_here=True))
        return int(number)


def advance_in_turn(chunks: Iterable[Iterator[None]]) -> None:
    """Run all chunks, two at a time.

    The two advance in turn, so their steps have one order on all ranks, and each step of a chunk comes after the same
    step of the chunk before.
    """
    waiting = iter(chunks)
    under_way: collections.deque[Iterator[None]] = collections.deque()
    while True:
        chunk = next(waiting, None) if len(under_way) < 2 else None
        if chunk is None:
            if not under_way:
                return
            chunk = under_way.popleft()
        try:
            next(chunk)
        except StopIteration:
            continue
        under_way.append(chunk)


def seconds_until(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _regions(memory: Tensor, piece: Chunk) -> dict[int, Tensor]:
    """The region of each tensor of a chunk in its slot."""
    regions, at = {}, 0
    for tensor in (*piece.inputs, *piece.outputs):
        regions[id(tensor)] = memory[at : at + tensor.numel()]
        at += -(-tensor.numel() // ALIGN_BYTES) * ALIGN_BYTES
    return regions


def bytes_of(tensor: Tensor) -> Bytes:
    """The addresses of a contiguous tensor's elements."""
    begin = tensor.data_ptr()
    return begin, begin + tensor.nbytes


def _overlap(one: Bytes, other: Bytes) -> bool:
    return one[0] < other[1] and other[0] < one[1]
