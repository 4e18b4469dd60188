"""Horovod's allgather, broadcast, alltoall and reducescatter: blocking with autograd, asynchronous, and some of them in
place or of lists of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from netfold.horovod.torch.compression import Compression
from netfold.horovod.torch.execution import NUMBERS, Operation
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
    submit,
    submit_into,
    synchronize,
)
from netfold.horovod.torch.process_sets import ProcessSet, global_process_set
from netfold.horovod.torch.reductions import allreduce, grouped_allreduce

Tensor = torch.Tensor

# --- allgather -----------------------------------------------------------------------------------------------------


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """Begin an allgather: every rank's rows, one rank after the other. Ranks may have differently many rows."""
    return _allgather([tensor], name, process_set, True, first)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """`allgather_async` of several tensors as one operation; a list of new tensors."""
    return _allgather(tensors, name, process_set, True, list)


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Every rank's rows, one rank after the other. Gradients are averaged, and each rank gets those of its rows."""
    gathered: tuple[Tensor] = apply(_Allgather, name, process_set, tensor)
    return gathered[0]


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """`allgather` of several tensors as one operation."""
    return list(apply(_Allgather, name, process_set, *tensors))


def _allgather(
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    background: bool,
    result: Callable[[list[Tensor]], Any],
) -> Handle:
    check_tensors(tensors, (*NUMBERS, torch.bool))
    engine = process_set.engine()
    call = make_call(engine, "allgather", name, tensors, rows_differ=True)
    return submit(engine, Operation(call, [tensor.detach() for tensor in tensors], result=result), background)


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: Any, process_set: Any, *tensors: Tensor) -> Any:
        ctx.rows = [len(tensor) if tensor.dim() else 1 for tensor in tensors]
        ctx.shapes = [tensor.shape for tensor in tensors]
        ctx.process_set = process_set
        return synchronize(_allgather(tensors, name, process_set, False, tuple))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        reduced = grouped_allreduce([each.contiguous() for each in gradients], op=Average, process_set=ctx.process_set)
        everyone = allgather(torch.tensor([ctx.rows], dtype=torch.int64), process_set=ctx.process_set)
        firsts = everyone[: ctx.process_set.rank()].sum(dim=0).tolist()
        own = [
            each.narrow(0, first, rows).reshape(shape)
            for each, first, rows, shape in zip(reduced, firsts, ctx.rows, ctx.shapes, strict=True)
        ]
        return (None, None, *own)


# --- broadcast -----------------------------------------------------------------------------------------------------


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin a broadcast; `synchronize` returns a new tensor with the root's values. root_rank: a rank of the job."""
    return _broadcast([tensor], [torch.empty_like(tensor)], root_rank, name, process_set, True, first)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """As `broadcast_async`, into the tensor itself."""
    return _broadcast([tensor], [tensor], root_rank, name, process_set, True, first)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Replace the tensor by the root's; that tensor."""
    roots: Tensor = synchronize(_broadcast([tensor], [tensor], root_rank, name, process_set, False, first))
    return roots


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The root's tensor as a new one. The root's gradient is the ranks' average, and zero on every other rank."""
    roots: Tensor = apply(_Broadcast, tensor, root_rank, name, process_set)
    return roots


def broadcast_all(
    tensors: Sequence[Tensor], root_rank: int, name: str | None, process_set: ProcessSet = global_process_set
) -> None:
    """Replace tensors by the root's, as one operation; small ones are packed."""
    if tensors:
        synchronize(_broadcast(tensors, tensors, root_rank, name, process_set, False, list))


def _broadcast(
    tensors: Sequence[Tensor],
    outputs: Sequence[Tensor],
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    background: bool,
    result: Callable[[list[Tensor]], Any],
) -> Handle:
    check_tensors(tensors, (*NUMBERS, torch.bool))
    engine = process_set.engine()
    call = make_call(engine, "broadcast", name, tensors, root=process_set.root(root_rank))
    return submit_into(outputs, engine, call, tensors, background, result)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: Any, process_set: Any) -> Any:
        ctx.options = (root_rank, process_set)
        return synchronize(_broadcast([tensor], [torch.empty_like(tensor)], root_rank, name, process_set, False, first))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        root_rank, process_set = ctx.options
        reduced = allreduce(gradient.contiguous(), op=Average, process_set=process_set)
        if process_set.rank() != process_set.root(root_rank):
            reduced = torch.zeros_like(reduced)
        return reduced, None, None, None


# --- alltoall ------------------------------------------------------------------------------------------------------


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin an alltoall; `synchronize` returns the received rows and how many came from each rank (int32)."""
    return _alltoall(tensor, splits, name, process_set, True)


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send splits[r] rows to rank r, or equally many, and return the rows received, in rank order; with `splits` also
    how many came from each rank. A gradient goes back the way the rows came."""
    received, rows = apply(_Alltoall, tensor, splits, name, process_set)
    return received if splits is None else (received, rows)


def _alltoall(tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet, background: bool) -> Handle:
    check_tensors([tensor], (*NUMBERS, torch.bool))
    engine = process_set.engine()
    rows = len(tensor) if tensor.dim() else 1
    if splits is None:
        if rows % engine.size:
            raise ValueError(f"alltoall: {rows} rows cannot be split equally among {engine.size} ranks; pass splits")
        counts, like = [rows // engine.size] * engine.size, None
    else:
        like = splits if isinstance(splits, Tensor) else None
        if like is not None and like.is_floating_point():
            raise ValueError(f"alltoall: splits must be whole numbers, not {like.dtype}")
        counts = [int(count) for count in splits]
    if len(counts) != engine.size or sum(counts) > rows or min(counts) < 0:
        raise ValueError(
            f"alltoall: splits {counts} must be {engine.size} numbers, none negative, whose sum is at most the "
            f"tensor's {rows} rows"
        )
    call = make_call(engine, "alltoall", name, [tensor], rows_differ=True)

    def result(outputs: list[Tensor]) -> tuple[Tensor, Tensor]:
        if like is None:
            return outputs[0], torch.tensor(operation.received, dtype=torch.int32)
        return outputs[0], torch.tensor(operation.received, dtype=like.dtype, device=like.device)

    operation = Operation(call, [tensor.detach()], splits=counts, result=result)
    return submit(engine, operation, background)


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Any, name: Any, process_set: Any) -> Any:
        received, rows = synchronize(_alltoall(tensor, splits, name, process_set, False))
        ctx.rows, ctx.process_set, ctx.shape = rows, process_set, tensor.shape
        ctx.mark_non_differentiable(rows)
        return received, rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *unused: Any) -> Any:
        back, _ = alltoall(gradient.contiguous(), ctx.rows, process_set=ctx.process_set)
        if back.shape != ctx.shape:  # rows that went nowhere
            back = torch.cat([back, back.new_zeros((ctx.shape[0] - len(back), *ctx.shape[1:]))])
        return back, None, None, None


# --- reducescatter -------------------------------------------------------------------------------------------------


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begin a reducescatter; `synchronize` returns this rank's rows of the reduction."""
    return _reducescatter([tensor], name, op, process_set, prescale_factor, postscale_factor, True, first)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """`reducescatter_async` of several tensors as one operation; a list of new tensors."""
    return _reducescatter(tensors, name, op, process_set, prescale_factor, postscale_factor, True, list)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """This rank's rows of the reduction over all ranks; the first ranks get one more where rows do not divide."""
    compressed, ctx = compression.compress(tensor)
    reduced = apply(_Reducescatter, name, op, process_set, prescale_factor, postscale_factor, compressed)
    result: Tensor = compression.decompress(reduced[0], ctx)
    return result


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """`reducescatter` of several tensors as one operation."""
    compressed, contexts = zip(*[compression.compress(tensor) for tensor in tensors], strict=True)
    reduced = apply(_Reducescatter, name, op, process_set, prescale_factor, postscale_factor, *compressed)
    return [compression.decompress(tensor, ctx) for tensor, ctx in zip(reduced, contexts, strict=True)]


def _reducescatter(
    tensors: Sequence[Tensor],
    name: str | None,
    op: str,
    process_set: ProcessSet,
    prescale: float,
    postscale: float,
    background: bool,
    result: Callable[[list[Tensor]], Any],
) -> Handle:
    if op == Adasum:
        raise NotImplementedError("reducescatter takes no Adasum, here as in Horovod")
    if op not in OPS:
        raise ValueError(f"no operator {op!r}; there are hvd.Average, Sum, Min, Max and Product")
    check_tensors(tensors, NUMBERS)
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError("reducescatter: a tensor without dimensions has no rows to scatter")
    engine = process_set.engine()
    call = make_call(engine, "reducescatter", name, tensors, op=op, prescale=prescale, postscale=postscale)
    return submit(engine, Operation(call, [tensor.detach() for tensor in tensors], result=result), background)


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: Any, op: Any, process_set: Any, prescale: Any, postscale: Any, *tensors: Tensor) -> Any:
        ctx.options = (op, process_set, prescale * postscale)
        return synchronize(_reducescatter(tensors, name, op, process_set, prescale, postscale, False, tuple))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        op, process_set, factor = ctx.options
        if op == Sum:  # Horovod's convention: gradients are averages over the ranks
            factor *= process_set.size()
        scaled = [gradient * factor for gradient in gradients]
        return (None, None, None, None, None, *grouped_allgather(scaled, process_set=process_set))


# --- sparse tensors ------------------------------------------------------------------------------------------------


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: str, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Begin an allreduce of a sparse tensor: all ranks' indices and values, one after the other; a function that waits
    and returns the sparse result, whose entries may repeat (`coalesce`)."""
    if op not in (Average, Sum):
        raise ValueError(f"sparse tensors can be added and averaged, and not reduced by {op}")
    given = tensor.coalesce()
    label = None if name is None else f"{name}.indices"
    indices = allgather_async(given.indices().t().contiguous(), label, process_set)
    values = allgather_async(given.values(), None if name is None else f"{name}.values", process_set)

    def wait() -> Tensor:
        where, what = synchronize(indices), synchronize(values)
        if op == Average:
            what = what / process_set.engine().size
        return torch.sparse_coo_tensor(where.t(), what, tensor.size(), check_invariants=False)

    return wait
