"""Collectives through pinned host memory, in a pipeline of chunks.

The pipeline is native (core/native/device/include/netfold/device/host_staging.hpp): a call's chunks need neither Python
nor the GIL. Here are the beginning and the end of a call, the order of calls on the same memory, and errors.

Chunks leave, run and return in the same order on every rank, as the native group requires. The results are complete
after the event that follows the last chunk's return.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from netfold._native import device as native
from netfold.communicator import Group
from netfold.communicator.group import ELEMENTS, KINDS, REDUCE_OPS
from netfold.torch.calls import Prepared
from netfold.torch.device.chunks import chunk_elements, copies_of, count_chunks
from netfold.torch.device.device_api import DeviceApi, Event, device_failed, overdue
from netfold.torch.device.pinned import Slots

Tensor = torch.Tensor

# With more results than this, remove those whose copies are done.
_MAX_LANDING = 256

Bytes = tuple[int, int]  # the first address, and the one after the last


@dataclass(eq=False)
class _CallUnderWay:
    call: Prepared
    ready: Event  # the pipeline has its handle
    written: Sequence[Tensor]
    returned: Callable[[Event], None]


@dataclass(frozen=True, eq=False)
class _Landing:
    """Bytes that the device may use until `event`."""

    bytes: Bytes
    event: Event


class HostStaging:
    """The pipeline of one group and one device. Not thread-safe, but for `interrupt`."""

    def __init__(self, group: Group, device_api: DeviceApi, device: torch.device, slots: Slots) -> None:
        self._group = group
        self._device_api = device_api
        self._device = device
        streams: list[Any] = [device_api.new_stream(device) for _ in range(2)]
        self.out, self.back = streams
        self.memory = slots
        self._slot_bytes = slots.memory[0].numel()
        self._native = native.HostStaging(
            group.native,
            device_api.native_driver(device),
            *(stream.cuda_stream for stream in streams),
            [(memory.data_ptr(), memory.numel()) for memory in slots.memory],
        )
        self._calls: dict[int, _CallUnderWay] = {}
        # Memory that calls under way will write, and memory that the device may still write or read for a call whose
        # chunks are all done. Later calls on overlapping bytes wait for both.
        self._written: collections.Counter[Bytes] = collections.Counter()
        self._landing: list[_Landing] = []

    def elements_a_slot(self, call: Prepared) -> int:
        """The number of elements of each tensor of `call` that one slot takes."""
        return chunk_elements(call, self._group.size, self._slot_bytes)

    @property
    def busy(self) -> bool:
        return bool(self._native.busy)

    @property
    def interrupts(self) -> int:
        """The number of calls of `interrupt`."""
        return int(self._native.interrupts)

    def interrupt(self) -> None:
        """Have `begin` and `step` return to their caller early. From any thread."""
        self._native.interrupt()

    def begin(
        self,
        call: Prepared,
        ready: Event,
        deadline: float,
        returned: Callable[[Event], None],
        interrupts: int | None = None,
    ) -> None:
        """Start a call's chunks. Returns once they have left.

        ready: the event after which the tensors hold their values. One of the device API's.
        returned: called, by `step` at the latest, with the event after which the results are in place.
        interrupts: go on until all chunks have returned, unless `interrupt` is called after this count.
        """
        some = [*call.inputs, *call.outputs]
        elements = self.elements_a_slot(call)
        count = count_chunks(call, elements)
        if call.kind == "all_to_all":
            self.drain()  # all ranks must submit in one order
            count = self._greatest(count, deadline)
        elif any(_overlap(bytes_of(tensor), each) for tensor in some for each in self._written):
            self.drain()
        for event in self.events_on(some):
            self.out.wait_event(event)
            self.back.wait_event(event)
        for tensor in some:
            self._device_api.keep(tensor, self.out)
            self._device_api.keep(tensor, self.back)
        of_inputs, of_outputs = copies_of(call, self._group.rank)
        number = self._native.begin(
            KINDS[call.kind],
            ELEMENTS[call.dtype],
            REDUCE_OPS[call.reduce],
            call.average,
            call.root,
            _places(call.inputs),
            _places(call.outputs),
            of_inputs,
            of_outputs,
            elements,
            count,
            ready.cuda_event,
            int(deadline * 1e9),
        )
        written = [
            tensor
            for tensors, copies in ((call.inputs, of_inputs), (call.outputs, of_outputs))
            if copies.to_device
            for tensor in tensors
        ]
        self._written.update(bytes_of(tensor) for tensor in written)
        self._calls[number] = _CallUnderWay(call, ready, written, returned)
        if interrupts is None:
            self._run(native.LEFT)
        else:
            self._run(native.RETURNED, interrupts)

    def step(self, interrupts: int = native.NEVER) -> None:
        """Run the chunks under way until a call is finished, or `interrupt` is called after the count `interrupts`."""
        self._advance(native.RETURNED, interrupts)

    def move(self) -> None:
        """Move one chunk to its next stage."""
        self._advance(native.MOVED)

    def start(self) -> None:
        """Submit the collectives of all chunks that have begun. Waits for their copies to the host."""
        self._run(native.SUBMITTED)

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
        self._run(native.RETURNED)

    def forget(self) -> None:
        """Drop all chunks under way, after the group's failure. Returns once no collective uses a slot."""
        self._native.forget()
        self._calls.clear()

    def _run(self, goal: int, interrupts: int = native.NEVER) -> None:
        """Run until `goal`, or until all chunks have left and `interrupt` is called after the count `interrupts`."""
        while not self._advance(goal, interrupts):
            pass

    def _advance(self, goal: int, interrupts: int = native.NEVER) -> bool:
        """As `_run`, but at most until a call is finished. Returns whether the goal is reached."""
        reached, finished, fault = self._native.run(goal, interrupts)
        for number, event in finished:
            self._finish(self._calls.pop(number), event)
        if fault is not None:
            raise self._error(*fault)
        return bool(reached)

    def _finish(self, ended: _CallUnderWay, event: Event) -> None:
        self._written.subtract(bytes_of(tensor) for tensor in ended.written)
        self._written += collections.Counter()  # removes zeros
        self.in_use(ended.written, event)
        ended.returned(event)

    def _error(self, kind: str, number: int, text: str, waited_s: float, operation: Any) -> Exception:
        """The exception for the fault that ended the pipeline."""
        rank, what = self._group.rank, self._calls[number].call.kind
        if kind == "operation":
            return self._group.error(operation)
        if kind == "overdue":
            return overdue(rank, f"{what}: {text}", waited_s)
        failure = self._group.failure if kind == "group" else None
        return failure or device_failed(rank, f"{what} on {self._device}", text)

    def in_use(self, tensors: Iterable[Tensor], event: Event) -> None:
        """Have later calls on these tensors' bytes wait for `event`.

        The work before the event must come after all earlier events of the same bytes.
        """
        if len(self._landing) > _MAX_LANDING:
            self._landing = [each for each in self._landing if not each.event.query()]
        for begin, end in map(bytes_of, tensors):
            if begin == end:
                continue
            # The new event comes after those of all bytes in its range.
            kept = [each for each in self._landing if each.bytes[0] < begin or end < each.bytes[1]]
            self._landing = [*kept, _Landing((begin, end), event)]

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


def _places(tensors: Sequence[Tensor]) -> list[tuple[int, int, int]]:
    """As the native pipeline takes tensors: address, bytes, bytes of an element."""
    return [(tensor.data_ptr(), tensor.nbytes, tensor.element_size()) for tensor in tensors]


def bytes_of(tensor: Tensor) -> Bytes:
    """The addresses of a contiguous tensor's elements."""
    begin = tensor.data_ptr()
    return begin, begin + tensor.nbytes


def _overlap(one: Bytes, other: Bytes) -> bool:
    return one[0] < other[1] and other[0] < one[1]
