"""Operations under way, and what all kinds of operations have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from netfold.communicator import NetfoldError
from netfold.horovod.torch.execution import Operation
from netfold.horovod.torch.negotiation import Call, Request
from netfold.horovod.torch.process_sets import ProcessSet, global_process_set
from netfold.horovod.torch.world import Engine

Tensor = torch.Tensor

# Horovod's operators are netfold's words; "adasum" is known so that it can be refused.
Average, Sum, Adasum, Min, Max, Product = "avg", "sum", "adasum", "min", "max", "product"
OPS = (Average, Sum, Min, Max, Product)


class Handle:
    """An operation under way; `poll` and `synchronize` take it."""

    def __init__(self, engine: Engine, operation: Operation) -> None:
        self._engine = engine
        self._operation = operation

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once. Never blocks."""
        return self._operation.done

    def wait(self) -> Any:
        """The result, once it is there. Raises HorovodInternalError."""
        self._engine.negotiation.wait(self._operation)
        try:
            return self._operation.result()
        except NetfoldError as error:
            raise self._engine.negotiation.fail(error) from error


def poll(handle: Handle) -> bool:
    """Whether `synchronize` would return at once."""
    return handle.done


def synchronize(handle: Handle) -> Any:
    """Wait for an operation and return its result. Raises HorovodInternalError where ranks differ or one failed."""
    return handle.wait()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank has called, or has joined."""
    engine = process_set.engine()
    request = Request(Call("barrier", engine.name("barrier", None)))
    engine.negotiation.submit(request, background=False)
    engine.negotiation.wait(request)


def join(device: int = -1) -> int:
    """Announce that this rank has no more data. Return the last rank to do so, once every rank has done so.

    Until then sums and averages of the other ranks go on, with zeros from this rank; an average divides by all ranks.
    Other operations are refused meanwhile. device: taken for Horovod's scripts' sake.
    """
    engine = global_process_set.engine()
    last = engine.negotiation.join()
    engine.count_anew()
    return last


def make_call(
    engine: Engine,
    kind: str,
    name: str | None,
    tensors: Sequence[Tensor],
    *,
    rows_differ: bool = False,
    prescale: float = 1.0,
    postscale: float = 1.0,
    **options: Any,
) -> Call:
    """The part of an operation that all ranks must agree on; `rows_differ`: without the tensors' first dimension."""
    return Call(
        kind,
        engine.name(kind, name),
        dtypes=tuple(str(tensor.dtype) for tensor in tensors),
        shapes=tuple(tuple(tensor.shape[1:] if rows_differ else tensor.shape) for tensor in tensors),
        prescale=float(prescale),  # whatever kind of number a script has
        postscale=float(postscale),
        **options,
    )


def submit(engine: Engine, operation: Operation, background: bool) -> Handle:
    """`background`: nobody waits for it yet."""
    engine.negotiation.submit(operation, background=background)
    return Handle(engine, operation)


def submit_into(
    outputs: Sequence[Tensor],
    engine: Engine,
    call: Call,
    tensors: Sequence[Tensor],
    background: bool,
    result: Callable[[list[Tensor]], Any],
) -> Handle:
    """Submit an operation that writes `outputs`: new tensors, or `tensors` in place. `result`: makes of them what
    `synchronize` returns."""
    inputs = [tensor.detach() for tensor in tensors]
    if outputs[0] is tensors[0]:
        # The caller's own tensors come back, not views of them.
        return submit(engine, Operation(call, inputs, inputs, result=lambda _: result(list(tensors))), background)
    return submit(engine, Operation(call, inputs, outputs, result=result), background)


def first(outputs: Sequence[Tensor]) -> Tensor:
    return outputs[0]


def check_tensors(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> None:
    if not tensors:
        raise ValueError("an operation needs at least one tensor")
    for tensor in tensors:
        if tensor.dtype not in dtypes:
            raise ValueError(f"a tensor of {tensor.dtype} cannot be sent here; {', '.join(map(str, dtypes))} can")
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"a {tensor.layout} tensor cannot travel as it is; sparse_allreduce_async adds sparse ones"
            )


def apply(function: Any, *arguments: Any) -> Any:
    """torch's own `apply` has no types."""
    return function.apply(*arguments)
