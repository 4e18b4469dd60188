"""Run the operations that all ranks agreed on.

`Engine.execute` runs on the thread that drives the negotiation, in the same order on every rank. It begins operations.
`Handle.wait` finishes them on the caller's thread. A small reduction runs at once if no other reduction is under way.
The engine packs tensors of one dtype and operator that are ready in the same cycle into one buffer. It copies a tensor
in a GPU's memory to the host and back.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from netfold.communicator import Communicator, NetfoldError, Work, empty
from netfold.horovod.fusion import FUSION_BYTES, batches
from netfold.horovod.torch.negotiation import Call, Negotiation, Ready, Request

Tensor = torch.Tensor

# The dtypes that reductions take. Operations that only move values take bool, too.
NUMBERS = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64,
)  # fmt: skip
_DTYPES = {str(dtype): dtype for dtype in (*NUMBERS, torch.bool)}
# Smaller buffers gain nothing from shared memory.
_MIN_SHARED_BYTES = 16 << 10
# Up to this size a reduction takes less time than a switch to the engine's thread and back.
_MAX_DIRECT_BYTES = 16 << 10
# The most memory of free buffers that is kept for later operations.
_MAX_KEPT_BYTES = 8 * FUSION_BYTES


class Transfer:
    """Operations of a Communicator, and a function that uses their results. The function runs once, after all."""

    def __init__(self, works: Sequence[Work], finish: Callable[[], None]) -> None:
        self._works = works
        self._finish: Callable[[], None] | None = finish
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        return all(work.done for work in self._works)

    def wait(self) -> None:
        with self._lock:
            for work in self._works:
                work.wait()
            finish, self._finish, self._works = self._finish, None, ()
            if finish is not None:
                with torch.no_grad():
                    finish()


class Handle(Request):
    """An operation under way. `poll` and `synchronize` take it."""

    def __init__(
        self,
        negotiation: Negotiation,
        call: Call,
        tensors: Sequence[Tensor],
        outputs: Sequence[Tensor] = (),
        splits: Sequence[int] = (),
    ) -> None:
        """Make this rank's part of an operation.

        outputs: where results go; `tensors` itself for an operation in place; empty if the engine makes the results.
        splits: the rows that an alltoall sends to each rank.
        """
        super().__init__(call)
        self._negotiation = negotiation
        self.inputs = [tensor.detach() for tensor in tensors]
        self.results = list(outputs)
        self.outputs = self.inputs if outputs is tensors else self.results
        self.splits = list(splits)
        self.received: list[int] = []  # the rows of an alltoall that came from each rank
        self.transfers: list[Transfer] = []
        # Makes of the results what `wait` returns.
        self.form: Callable[[list[Tensor]], Any] = list

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once. Never blocks."""
        return self.negotiated and all(transfer.done for transfer in self.transfers)

    def wait(self) -> Any:
        """Wait for the operation and return its result. Raises HorovodInternalError."""
        self._negotiation.wait(self)
        try:
            for transfer in self.transfers:
                transfer.wait()
        except NetfoldError as error:
            raise self._negotiation.fail(error) from error
        return self.form(self.results)


class Engine:
    """Runs the operations of one process set."""

    def __init__(self, control: Communicator, data: Communicator) -> None:
        """control: carries what ranks negotiate, and row counts. data: carries tensors."""
        self.control = control
        self.data = data
        self.negotiation = Negotiation(control, self.execute, self._abort)
        self._unnamed: dict[str, int] = {}
        self._buffers = _Buffers()
        self._last: Work | None = None

    @property
    def size(self) -> int:
        return self.data.size

    def name(self, kind: str, name: str | None) -> str:
        """Return `name`; without one, number this kind's unnamed operations: equal on ranks that call alike."""
        if name is not None:
            return name
        number = self._unnamed.get(kind, 0)
        self._unnamed[kind] = number + 1
        return f"noname.{number}"

    def count_anew(self) -> None:
        """Number unnamed operations from 0. All ranks have joined, after different numbers of operations."""
        self._unnamed.clear()

    def close(self) -> None:
        self.negotiation.close()
        self.data.close()

    def _abort(self, reason: str) -> None:
        self.control.group.abort(reason)
        self.data.group.abort(reason)

    def execute(self, ready: Sequence[Ready]) -> None:
        """Begin operations, in this order on every rank."""
        items = [
            _Item(call, number, handle if isinstance(handle, Handle) else None)
            for call, handle in ready
            if call.kind == "allreduce"
            for number in range(len(call.shapes))
        ]
        with torch.no_grad():
            for indices in batches([item.key for item in items], [item.nbytes for item in items]):
                self._allreduce([items[index] for index in indices])
            for call, handle in ready:
                if call.kind != "allreduce" and isinstance(handle, Handle):
                    getattr(self, f"_{call.kind}")(call, handle)

    # --- allreduce and broadcast, in buffers of several tensors ----------------------------------------------------

    def _allreduce(self, batch: list[_Item]) -> None:
        call = batch[0].call
        pairs = [
            (None, None) if item.handle is None else (item.handle.inputs[item.number], item.handle.outputs[item.number])
            for item in batch
        ]
        buffer, unpack = self._pack(batch[0].dtype, [item.elements for item in batch], pairs)
        op, factor = self._reduction(call, buffer)
        if call.prescale != 1.0:
            _scale(buffer, call.prescale)
        works = self._reduce(buffer, op) if buffer.numel() else []

        def finish() -> None:
            with torch.inference_mode():  # as in `unpack`
                if factor != 1.0:
                    _scale(buffer, factor)
            unpack()

        transfer = Transfer(works, finish)
        for item in batch:
            if item.handle is not None and transfer not in item.handle.transfers:
                item.handle.transfers.append(transfer)

    def _reduction(self, call: Call, tensor: Tensor) -> tuple[str, float]:
        """The engine's operator, and the factor of its result. An average of integers is rounded only once."""
        if call.op == "avg" and call.postscale != 1.0 and not tensor.is_floating_point():
            return "sum", call.postscale / self.data.size
        return call.op, call.postscale

    def _reduce(self, buffer: Tensor, op: str) -> list[Work]:
        if buffer.nbytes <= _MAX_DIRECT_BYTES and (self._last is None or self._last.done):
            self.data.all_reduce(buffer, op=op)
            return []
        self._last = self.data.all_reduce(buffer, op=op, asynchronous=True)
        return [self._last]

    def _broadcast(self, call: Call, handle: Handle) -> None:
        sources = handle.inputs if self.data.rank == call.root else handle.outputs
        pairs = list(zip(sources, handle.outputs, strict=True))
        # A tensor of _MIN_SHARED_BYTES and more travels alone.
        keys = [
            index if output.nbytes >= _MIN_SHARED_BYTES else str(output.dtype)
            for index, output in enumerate(handle.outputs)
        ]
        for indices in batches(keys, [output.nbytes for output in handle.outputs]):
            batch = [pairs[index] for index in indices]
            buffer, unpack = self._pack(batch[0][1].dtype, [output.numel() for _, output in batch], batch)
            works = [self.data.broadcast(buffer, call.root, asynchronous=True)] if buffer.numel() else []
            handle.transfers.append(Transfer(works, unpack))

    def _pack(
        self, dtype: torch.dtype, sizes: Sequence[int], pairs: Sequence[tuple[Tensor | None, Tensor | None]]
    ) -> tuple[Tensor, Callable[[], None]]:
        """Copy inputs into one buffer.

        sizes: elements of each tensor. pairs: an input and its output; None on a rank that has joined, for zeros.
        Returns the buffer, and a function that copies it to the outputs. A single output on the host is the buffer.
        """
        source, output = pairs[0]
        if len(pairs) == 1 and source is not None and output is not None and _is_plain(output):
            if source is not output:
                with torch.inference_mode():
                    output.copy_(source)
            return output.detach(), lambda: None
        total = sum(sizes)
        whole = self._buffers.take(dtype, total)
        parts = torch.split(whole[:total], list(sizes))
        for (source, _), part in zip(pairs, parts, strict=True):
            if source is None:
                part.zero_()
            else:
                part.copy_(source.reshape(-1))

        def unpack() -> None:
            # In this mode any tensor may be written, an inference tensor too, whose caller may wait outside of it.
            with torch.inference_mode():
                for (_, output), part in zip(pairs, parts, strict=True):
                    if output is not None:
                        output.copy_(part.view(output.shape))
            self._buffers.give(whole)

        return whole[:total], unpack

    # --- operations that make their results ------------------------------------------------------------------------

    def _allgather(self, call: Call, handle: Handle) -> None:
        own = [_host(tensor) for tensor in handle.inputs]
        rows = self.control.all_gather(np.array([len(tensor) for tensor in own], np.int64))
        works, results = [], []
        for index, tensor in enumerate(own):
            counts = rows[:, index].tolist()
            whole = tensor.new_empty((sum(counts), *tensor.shape[1:]))
            results.append(whole)
            if whole.numel():
                works.append(self.data.all_gather(tensor, list(torch.split(whole, counts)), asynchronous=True))
        _finish_with(handle, works, results)

    def _alltoall(self, call: Call, handle: Handle) -> None:
        tensor = _host(handle.inputs[0])
        rows = self.control.all_gather(np.array(handle.splits, np.int64))
        handle.received = received = rows[:, self.data.rank].tolist()
        into = tensor.new_empty((sum(received), *tensor.shape[1:]))
        works = []
        if rows.sum():
            sent = list(torch.split(tensor[: sum(handle.splits)], handle.splits))
            works.append(self.data.all_to_all(sent, list(torch.split(into, received)), asynchronous=True))
        _finish_with(handle, works, [into])

    def _reducescatter(self, call: Call, handle: Handle) -> None:
        works: list[Work] = []
        results: list[tuple[Tensor, float]] = []
        for tensor in handle.inputs:
            own = _host(tensor)
            if call.prescale != 1.0:
                own = own.clone()
                _scale(own, call.prescale)
            # The first ranks get one row more if the rows do not divide.
            counts = [len(own) // self.data.size + (r < len(own) % self.data.size) for r in range(self.data.size)]
            into = own.new_empty((counts[self.data.rank], *own.shape[1:]))
            op, factor = self._reduction(call, own)
            results.append((into, factor))
            if own.numel():
                parts = list(torch.split(own, counts))
                works.append(self.data.reduce_scatter(parts, into, op=op, asynchronous=True))

        def finish() -> None:
            for into, factor in results:
                if factor != 1.0:
                    _scale(into, factor)

        _finish_with(handle, works, [into for into, _ in results], finish)


def _finish_with(
    handle: Handle, works: list[Work], results: list[Tensor], before: Callable[[], None] = lambda: None
) -> None:
    """Move results from the host to the inputs' devices in `Handle.wait`, after `before`."""

    def finish() -> None:
        before()
        handle.results = [result.to(given.device) for result, given in zip(results, handle.inputs, strict=True)]

    handle.transfers.append(Transfer(works, finish))


class _Item(NamedTuple):
    """One tensor of an allreduce. handle: None on a rank that has joined."""

    call: Call
    number: int  # of the tensor in the call
    handle: Handle | None

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.call.dtypes[self.number]]

    @property
    def elements(self) -> int:
        return math.prod(self.call.shapes[self.number])

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize

    @property
    def key(self) -> tuple[Any, ...]:
        """Tensors with equal keys may share a buffer."""
        return self.dtype, self.call.op, self.call.prescale, self.call.postscale


def _scale(tensor: Tensor, factor: float) -> None:
    if tensor.is_floating_point():
        tensor.mul_(factor)
    else:  # rounds towards 0, as Horovod does
        tensor.copy_(tensor.double().mul_(factor))


def _host(tensor: Tensor) -> Tensor:
    """Return the values in contiguous host memory, with at least one dimension."""
    found = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    return found if found.dim() else found.reshape(1)


def _is_plain(tensor: Tensor) -> bool:
    """Whether the host's memory holds the tensor's values in order."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


class _Buffers:
    """Memory for packed tensors, kept for later operations: fresh pages would cost as much as the packing.

    The memory is shared, so ranks of one machine reduce it in place.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[Tensor]] = {}
        self._kept_bytes = 0

    def take(self, dtype: torch.dtype, elements: int) -> Tensor:
        """Return at least `elements` elements, in one dimension."""
        size = 1 << max(6, (elements * dtype.itemsize - 1).bit_length())
        with self._lock:
            free = self._free.get(size)
            if free:
                self._kept_bytes -= size
                return free.pop().view(dtype)
        with torch.inference_mode(False):  # later operations use the buffer outside of this mode, too
            if size < _MIN_SHARED_BYTES:
                return torch.empty(size, dtype=torch.uint8, device="cpu").view(dtype)
            return torch.from_numpy(empty(size, np.uint8)).view(dtype)

    def give(self, buffer: Tensor) -> None:
        """Keep a buffer for later operations, unless _MAX_KEPT_BYTES are kept already."""
        with self._lock:
            if self._kept_bytes + buffer.nbytes <= _MAX_KEPT_BYTES:
                self._kept_bytes += buffer.nbytes
                self._free.setdefault(buffer.nbytes, []).append(buffer.view(torch.uint8))
