"""Horovod's allreduce: blocking with autograd, asynchronous, in place, and of lists of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from netfold.horovod.torch.compression import Compression
from netfold.horovod.torch.execution import NUMBERS
from netfold.horovod.torch.handles import (
    OPS,
    Adasum,
    Average,
    Handle,
    Sum,
    apply,
    check_tensors,
    first,
    make_call,
    submit_into,
    synchronize,
)
from netfold.horovod.torch.process_sets import ProcessSet, global_process_set

Tensor = torch.Tensor


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin an allreduce; `synchronize` returns a new tensor.

    The ranks' operations are matched by `name`, or without one by the number of unnamed ones before. The tensor must
    not change until then. average: Horovod's old way to say `op`.
    """
    return begin(
        [tensor],
        [torch.empty_like(tensor)],
        average,
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        True,
        first,
    )


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """As `allreduce_async`, into the tensor itself."""
    return begin([tensor], [tensor], average, name, op, prescale_factor, postscale_factor, process_set, True, first)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Replace the tensor by the reduction over all ranks; that tensor."""
    reduced: Tensor = synchronize(
        begin([tensor], [tensor], average, name, op, prescale_factor, postscale_factor, process_set, False, first)
    )
    return reduced


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """The reduction over all ranks, an average by default, as a new tensor. Its gradient is reduced alike."""
    compressed, ctx = compression.compress(tensor)
    op = _operator(op, average)
    reduced = apply(_Allreduce, name, op, prescale_factor, postscale_factor, process_set, compressed)
    result: Tensor = compression.decompress(reduced[0], ctx)
    return result


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """`allreduce_async` of several tensors as one operation, packed into few messages; a list of new tensors."""
    outputs = [torch.empty_like(tensor) for tensor in tensors]
    return begin(tensors, outputs, average, name, op, prescale_factor, postscale_factor, process_set, True, list)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """As `grouped_allreduce_async`, into the tensors themselves."""
    return begin(tensors, tensors, average, name, op, prescale_factor, postscale_factor, process_set, True, list)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Replace several tensors by their reductions over all ranks; these tensors."""
    reduced: list[Tensor] = synchronize(
        begin(tensors, tensors, average, name, op, prescale_factor, postscale_factor, process_set, False, list)
    )
    return reduced


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """`allreduce` of several tensors as one operation, packed into few messages; new tensors."""
    compressed, contexts = zip(*[compression.compress(tensor) for tensor in tensors], strict=True)
    op = _operator(op, average)
    reduced = apply(_Allreduce, name, op, prescale_factor, postscale_factor, process_set, *compressed)
    return [compression.decompress(tensor, ctx) for tensor, ctx in zip(reduced, contexts, strict=True)]


def _operator(op: str | None, average: bool | None) -> str:
    if average is not None:
        if op is not None:
            raise ValueError("say op= or average=, not both: average is the old way to say op")
        return Average if average else Sum
    return Average if op is None else op


def begin(
    tensors: Sequence[Tensor],
    outputs: Sequence[Tensor],
    average: bool | None,
    name: str | None,
    op: str | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    background: bool,
    result: Callable[[list[Tensor]], Any],
    members: tuple[str, ...] = (),
) -> Handle:
    """Submit an allreduce; `outputs`, `background` and `result` as of `submit_into`. `members`: what is in a bucket of
    gradients."""
    chosen = check_operator(_operator(op, average), process_set)
    check_tensors(tensors, NUMBERS)
    engine = process_set.engine()
    call = make_call(
        engine, "allreduce", name, tensors, op=chosen, members=members, prescale=prescale, postscale=postscale
    )
    return submit_into(outputs, engine, call, tensors, background, result)


def check_operator(op: str, process_set: ProcessSet) -> str:
    """The operator; NotImplementedError for Adasum among several ranks, ValueError for what is none."""
    if op == Adasum:
        if process_set.engine().size > 1:
            raise NotImplementedError(
                "netfold has no Adasum: use op=hvd.Average with the learning rate scaled to the ranks, or hvd.Sum"
            )
        return Sum
    if op not in OPS:
        raise ValueError(f"no operator {op!r}; there are hvd.Average, Sum, Min, Max and Product")
    return op


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: Any, op: Any, prescale: Any, postscale: Any, process_set: Any, *tensors: Tensor) -> Any:
        ctx.options = (op, prescale, postscale, process_set)
        outputs = [torch.empty_like(tensor) for tensor in tensors]
        return synchronize(begin(tensors, outputs, None, name, op, prescale, postscale, process_set, False, tuple))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        op, prescale, postscale, process_set = ctx.options
        reduced = apply(_Allreduce, None, op, prescale, postscale, process_set, *gradients)
        return (None, None, None, None, None, *reduced)
