"""Run an operation that all ranks agreed on.

`Executor.execute` runs on the thread that drives the negotiation, in the same order on every rank. It begins
operations, and `Operation.result` finishes them on the caller's thread; only a small reduction, with nothing under way
before it, runs at once. Tensors of one dtype and operator that are ready in the same cycle are packed into one buffer.
A tensor in a GPU's memory is copied to the host and back.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from netfold.communicator import Communicator, Work, empty
from netfold.horovod.fusion import FUSION_BYTES
from netfold.horovod.torch.negotiation import Call, Ready, Request

Tensor = torch.Tensor

# The inputs of an operation of each kind.
NUMBERS = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64,
)  # fmt: skip
_DTYPES = {str(dtype): dtype for dtype in (*NUMBERS, torch.bool)}
# Below, a shared buffer brings nothing.
_MIN_SHARED_BYTES = 16 << 10
# To this size a reduction takes less than a hop to the engine's thread and back.
_MAX_DIRECT_BYTES = 16 << 10
# Of buffers kept for the next operation.
_MAX_KEPT_BYTES = 8 * FUSION_BYTES


class Transfer:
    """Operations of a Communicator, and what is to be done with their results, once."""

    def __init__(self, works: Sequence[Work], finish: Callable[[], None] | None) -> None:
        self._works = works
        self._finish = finish
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


class Operation(Request):
    """A rank's part of an operation; what `poll` and `synchronize` take.

    inputs: tensors; outputs: where results go, or None where the operation makes them; result: of `synchronize`.
    """

    def __init__(
        self,
        call: Call,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor] | None = None,
        *,
        splits: list[int] | None = None,
        result: Callable[[list[Tensor]], Any],
    ) -> None:
        super().__init__(call)
        self.inputs = inputs
        self.outputs: list[Tensor] = [] if outputs is None else list(outputs)
        self.splits = splits
        self.received: list[int] = []  # rows from each rank of an alltoall
        self.transfers: list[Transfer] = []
        self._result = result

    @property
    def done(self) -> bool:
        """Whether `result` would return at once. Never blocks."""
        return self.negotiated and all(transfer.done for transfer in self.transfers)

    def result(self) -> Any:
        """Wait for the transfers; NetfoldError where one failed."""
        for transfer in self.transfers:
            transfer.wait()
        return self._result(self.outputs)


class Executor:
    """Of one set of ranks."""

    def __init__(self, control: Communicator, data: Communicator) -> None:
        self._control = control
        self._data = data
        self._buffers = _Buffers()
        self._last: Work | None = None

    def execute(self, ready: list[Ready]) -> None:
        """Begin operations, in this order on every rank."""
        items: list[_Item] = []
        for each in ready:
            if each.call.kind == "allreduce":
                items += _items(each)
        with torch.no_grad():
            for batch in _batches(items):
                self._allreduce(batch)
            for each in ready:
                begin = getattr(self, f"_{each.call.kind}", None)
                if each.call.kind not in ("allreduce", "barrier") and isinstance(each.request, Operation):
                    assert begin is not None
                    begin(each.call, each.request)

    # --- allreduce -------------------------------------------------------------------------------------------------

    def _allreduce(self, batch: list[_Item]) -> None:
        call = batch[0].call
        dtype = _DTYPES[call.dtypes[batch[0].index]]
        average = call.op == "avg"
        op = "sum" if average and not dtype.is_floating_point else call.op
        divisor = self._data.size if op != call.op else 1
        source, own = (batch[0].input, batch[0].output) if len(batch) == 1 else (None, None)
        if source is not None and own is not None and own.is_cpu and own.is_contiguous():
            if source is not own:
                own.copy_(source)
            buffer, whole = own.detach(), None
        else:
            total = sum(item.elements for item in batch)
            whole = self._buffers.take(dtype, total)
            buffer = whole[:total]
            for item, place in zip(batch, _places(buffer, batch), strict=True):
                if item.input is None:
                    place.zero_()
                else:
                    place.copy_(item.input.reshape(-1))
        if call.prescale != 1.0:
            _scale(buffer, call.prescale)
        works = self._reduce(buffer, op) if buffer.numel() else []

        def finish() -> None:
            if divisor != 1 and call.postscale == 1.0:
                buffer.div_(divisor, rounding_mode="trunc")
            elif divisor != 1 or call.postscale != 1.0:
                _scale(buffer, call.postscale / divisor)
            if whole is not None:
                for item, place in zip(batch, _places(buffer, batch), strict=True):
                    if item.output is not None:
                        item.output.copy_(place.view(item.output.shape))
                self._buffers.give(whole)

        transfer = Transfer(works, finish)
        for item in batch:
            if item.operation is not None and (
                not item.operation.transfers or item.operation.transfers[-1] != transfer
            ):
                item.operation.transfers.append(transfer)

    def _reduce(self, buffer: Tensor, op: str) -> list[Work]:
        if buffer.nbytes <= _MAX_DIRECT_BYTES and (self._last is None or self._last.done):
            self._data.all_reduce(buffer, op=op)
            return []
        self._last = self._data.all_reduce(buffer, op=op, asynchronous=True)
        return [self._last]

    # --- copies and barriers ---------------------------------------------------------------------------------------

    def _allgather(self, call: Call, operation: Operation) -> None:
        mine = [_host(tensor) for tensor in operation.inputs]
        rows = self._control.all_gather(np.array([len(tensor) for tensor in mine], np.int64))
        works, made = [], []
        for index, tensor in enumerate(mine):
            counts = rows[:, index].tolist()
            whole = tensor.new_empty((sum(counts), *tensor.shape[1:]))
            made.append(whole)
            if whole.numel():
                works.append(self._data.all_gather(tensor, list(torch.split(whole, counts)), asynchronous=True))
        self._hand_out(operation, works, made)

    def _broadcast(self, call: Call, operation: Operation) -> None:
        here = self._data.rank == call.root
        works, buffers, finishes = [], [], []
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, tensor in enumerate(operation.outputs):
            alone = tensor.is_cpu and tensor.is_contiguous() and tensor.nbytes >= _MIN_SHARED_BYTES
            if alone or (len(operation.outputs) == 1 and tensor.is_cpu and tensor.is_contiguous()):
                if here and operation.inputs[index] is not tensor:
                    tensor.copy_(operation.inputs[index])
                if tensor.numel():
                    works.append(self._data.broadcast(tensor.detach(), call.root, asynchronous=True))
            else:
                by_dtype.setdefault(tensor.dtype, []).append(index)
        for dtype, indices in by_dtype.items():
            sizes = [operation.outputs[index].numel() for index in indices]
            buffer = torch.empty(sum(sizes), dtype=dtype)
            places = torch.split(buffer, sizes)
            if here:
                for index, place in zip(indices, places, strict=True):
                    place.copy_(operation.inputs[index].reshape(-1))
            if buffer.numel():
                works.append(self._data.broadcast(buffer, call.root, asynchronous=True))
            buffers.append(buffer)
            finishes += [(operation.outputs[i], place) for i, place in zip(indices, places, strict=True)]

        def finish() -> None:
            for output, place in finishes:
                output.copy_(place.view(output.shape))

        operation.transfers.append(Transfer(works, finish))

    def _alltoall(self, call: Call, operation: Operation) -> None:
        (tensor,) = (_host(each) for each in operation.inputs)
        assert operation.splits is not None
        rows = self._control.all_gather(np.array(operation.splits, np.int64))
        operation.received = rows[:, self._data.rank].tolist()
        into = tensor.new_empty((sum(operation.received), *tensor.shape[1:]))
        works = []
        if rows.sum():
            works.append(
                self._data.all_to_all(
                    list(torch.split(tensor[: sum(operation.splits)], operation.splits)),
                    list(torch.split(into, operation.received)),
                    asynchronous=True,
                )
            )
        self._hand_out(operation, works, [into])

    def _reducescatter(self, call: Call, operation: Operation) -> None:
        works, made = [], []
        for tensor in operation.inputs:
            mine = _host(tensor)
            if call.prescale != 1.0:
                mine = mine.clone()
                _scale(mine, call.prescale)
            counts = rows_per_rank(len(mine), self._data.size)
            into = mine.new_empty((counts[self._data.rank], *mine.shape[1:]))
            op = "sum" if call.op == "avg" and not mine.is_floating_point() else call.op
            made.append(into)
            if mine.numel():
                parts = list(torch.split(mine, counts))
                works.append(self._data.reduce_scatter(parts, into, op=op, asynchronous=True))

        def finish() -> None:
            for into in made:
                if call.op == "avg" and not into.is_floating_point():
                    into.copy_(into.double().div_(self._data.size).mul_(call.postscale))
                elif call.postscale != 1.0:
                    _scale(into, call.postscale)

        self._hand_out(operation, works, made, finish)

    @staticmethod
    def _hand_out(
        operation: Operation, works: list[Work], made: list[Tensor], before: Callable[[], None] | None = None
    ) -> None:
        """Results on the host go to the inputs' devices when the operation is waited for."""

        def finish() -> None:
            if before is not None:
                before()
            operation.outputs = [result.to(given.device) for result, given in zip(made, operation.inputs, strict=True)]

        operation.transfers.append(Transfer(works, finish))


def rows_per_rank(rows: int, size: int) -> list[int]:
    """How many rows of a reducescatter each rank gets: the first ranks one more where rows do not divide."""
    return [rows // size + (rank < rows % size) for rank in range(size)]


class _Item:
    """One tensor of an allreduce; of a rank that has joined, no tensor."""

    __slots__ = ("call", "elements", "index", "input", "operation", "output")

    def __init__(self, call: Call, index: int, operation: Operation | None) -> None:
        self.call = call
        self.index = index
        self.operation = operation
        self.elements = math.prod(call.shapes[index])
        self.input = None if operation is None else operation.inputs[index]
        self.output = None if operation is None else operation.outputs[index]


def _items(ready: Ready) -> list[_Item]:
    operation = ready.request if isinstance(ready.request, Operation) else None
    return [_Item(ready.call, index, operation) for index in range(len(ready.call.shapes))]


def _batches(items: Sequence[_Item]) -> list[list[_Item]]:
    """Tensors that travel together: of one dtype, operator and scale, up to FUSION_BYTES; alike on every rank."""
    batches: list[list[_Item]] = []
    open_: dict[Any, tuple[list[_Item], int]] = {}
    for item in items:
        call = item.call
        key = (call.dtypes[item.index], call.op, call.prescale, call.postscale)
        size = item.elements * _DTYPES[key[0]].itemsize
        batch, used = open_.get(key, ([], 0))
        if not batch or used + size > FUSION_BYTES:
            batch, used = [], 0
            batches.append(batch)
        batch.append(item)
        open_[key] = (batch, used + size)
    return batches


def _places(buffer: Tensor, batch: Sequence[_Item]) -> Sequence[Tensor]:
    return torch.split(buffer, [item.elements for item in batch])


def _scale(tensor: Tensor, factor: float) -> None:
    if tensor.is_floating_point():
        tensor.mul_(factor)
    else:  # towards 0, as Horovod rounds
        tensor.copy_(tensor.double().mul_(factor))


def _host(tensor: Tensor) -> Tensor:
    """Contiguous host memory with at least one dimension."""
    found = tensor.detach().cpu().contiguous()
    return found if found.dim() else found.reshape(1)


class _Buffers:
    """Memory for packed tensors, kept for the next operation: fresh pages would cost as much as the packing. In shared
    memory, where ranks of one machine reduce it in place."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[Tensor]] = {}
        self._kept_bytes = 0

    def take(self, dtype: torch.dtype, elements: int) -> Tensor:
        """At least so many elements, in one dimension."""
        size = 1 << max(6, (elements * dtype.itemsize - 1).bit_length())
        with self._lock:
            free = self._free.get(size)
            if free:
                self._kept_bytes -= size
                return free.pop().view(dtype)
        raw = (
            torch.empty(size, dtype=torch.uint8)
            if size < _MIN_SHARED_BYTES
            else torch.from_numpy(empty(size, np.uint8))
        )
        return raw.view(dtype)

    def give(self, buffer: Tensor) -> None:
        with self._lock:
            if self._kept_bytes + buffer.nbytes <= _MAX_KEPT_BYTES:
                self._kept_bytes += buffer.nbytes
                self._free.setdefault(buffer.nbytes, []).append(buffer.view(torch.uint8))


__all__ = ["NUMBERS", "Executor", "Operation", "Transfer", "rows_per_rank"]
