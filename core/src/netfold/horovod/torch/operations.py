"""Horovod's operations on tensors.

Each kind of operation has one function that submits it (`begin_allreduce`, `_allgather` ...). The public functions
differ from each other in three ways: they block or return a Handle; take one tensor or several; make new tensors or
replace the given ones. Blocking functions that make new tensors carry gradients (the `torch.autograd.Function`s).
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, overload

import torch

from netfold.horovod.torch.compression import Compression
from netfold.horovod.torch.execution import NUMBERS, Handle
from netfold.horovod.torch.negotiation import Call, Request
from netfold.horovod.torch.world import ProcessSet, global_process_set

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]

Tensor = torch.Tensor
P = ParamSpec("P")

# Horovod's operators are netfold's words. "adasum" is known, so that netfold can refuse it.
Average, Sum, Adasum, Min, Max, Product = "avg", "sum", "adasum", "min", "max", "product"
_OPS = (Average, Sum, Min, Max, Product)


def poll(handle: Handle) -> bool:
    """Whether `synchronize` would return at once."""
    return handle.done


def synchronize(handle: Handle) -> Any:
    """Wait for an operation and return its result. HorovodInternalError if ranks differ or one failed."""
    return handle.wait()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank has called this, or has joined."""
    engine = process_set.engine()
    request = Request(Call("barrier", engine.name("barrier", None)))
    engine.negotiation.submit(request, background=False)
    engine.negotiation.wait(request)


def join(device: int = -1) -> int:
    """Announce that this rank has no more data. Once every rank has done so, return the last rank to do so.

    Until then, sums and averages of the other ranks proceed with zeros from this rank; an average divides by all ranks.
    Other operations are refused meanwhile. device: has no effect; Horovod's scripts pass it.
    """
    engine = global_process_set.engine()
    last = engine.negotiation.join()
    engine.count_anew()
    return last


# --- what all kinds have in common -----------------------------------------------------------------------------------


def _begin(
    kind: str,
    tensors: Sequence[Tensor],
    outputs: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    background: bool,
    *,
    dtypes: Sequence[torch.dtype] = (*NUMBERS, torch.bool),
    rows_differ: bool = False,
    splits: Sequence[int] = (),
    **agreed: Any,
) -> Handle:
    """Submit an operation.

    outputs, splits: as of `Handle`.
    background: no thread waits for the operation yet, so the negotiation's thread drives it.
    dtypes: those that the operation takes.
    rows_differ: ranks need not agree on the tensors' first dimension.
    agreed: further fields of `Call`.
    """
    if not tensors:
        raise ValueError("an operation needs at least one tensor")
    for tensor in tensors:
        if tensor.dtype not in dtypes:
            raise ValueError(f"a tensor of {tensor.dtype} cannot be sent here; {', '.join(map(str, dtypes))} can")
        if tensor.layout is not torch.strided:
            raise ValueError(f"a {tensor.layout} tensor cannot be sent; sparse_allreduce_async adds sparse tensors")
    engine = process_set.engine()
    call = Call(
        kind,
        engine.name(kind, name),
        dtypes=tuple(str(tensor.dtype) for tensor in tensors),
        shapes=tuple(tuple(tensor.shape[1:] if rows_differ else tensor.shape) for tensor in tensors),
        **agreed,
    )
    handle = Handle(engine.negotiation, call, tensors, outputs, splits)
    engine.negotiation.submit(handle, background=background)
    return handle


def _apply(function: Any, *arguments: Any) -> Any:
    """Call an autograd function: torch's `apply` has no types."""
    return function.apply(*arguments)


def _first(handle: Handle) -> Handle:
    """Have `synchronize` return the only tensor, not a list."""
    handle.form = operator.itemgetter(0)
    return handle


@overload
def _of_one(
    grouped: Callable[Concatenate[Sequence[Tensor], P], Handle],
) -> Callable[Concatenate[Tensor, P], Handle]: ...
@overload
def _of_one(
    grouped: Callable[Concatenate[Sequence[Tensor], P], list[Tensor]],
) -> Callable[Concatenate[Tensor, P], Tensor]: ...
def _of_one(grouped: Any) -> Any:
    """Make the operation on one tensor from the operation on several. Its arguments are the same after the first."""

    def of_one(tensor: Tensor, *args: Any, **options: Any) -> Any:
        made = grouped([tensor], *args, **options)
        return _first(made) if isinstance(made, Handle) else made[0]

    single: Any = of_one
    single.__name__ = single.__qualname__ = grouped.__name__.removeprefix("grouped_")
    single.__doc__ = f"As `{grouped.__name__}`, for one tensor: takes a tensor, and gives a tensor in place of a list."
    signature = inspect.signature(grouped)
    first, *others = signature.parameters.values()
    single.__signature__ = signature.replace(
        parameters=[first.replace(name="tensor", annotation="Tensor"), *others],
        return_annotation=signature.return_annotation.replace("list[Tensor]", "Tensor"),
    )
    return single


def check_operator(op: str, process_set: ProcessSet) -> str:
    """Return the operator. NotImplementedError for Adasum among several ranks, ValueError for an unknown operator."""
    if op == Adasum:
        if process_set.engine().size > 1:
            raise NotImplementedError(
                "netfold has no Adasum: use op=hvd.Average with the learning rate scaled to the ranks, or hvd.Sum"
            )
        return Sum
    if op not in _OPS:
        raise ValueError(f"no operator {op!r}; there are hvd.Average, Sum, Min, Max and Product")
    return op


# --- allreduce -------------------------------------------------------------------------------------------------------


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin one allreduce of several tensors, packed into few messages; `synchronize` returns new tensors.

    average: Horovod's former way to pass `op`.
    name: ranks match operations by it; without a name, by the number of operations of this kind without a name so far.
    The tensors must not change until the operation is done.
    """
    outputs = [torch.empty_like(tensor) for tensor in tensors]
    op = _operator(op, average)
    return begin_allreduce(tensors, outputs, name, op, prescale_factor, postscale_factor, process_set, True)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """As `grouped_allreduce_async`, but replaces the tensors by their reductions."""
    op = _operator(op, average)
    return begin_allreduce(tensors, tensors, name, op, prescale_factor, postscale_factor, process_set, True)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Replace the tensors by their reductions over all ranks, as one operation. Returns these tensors."""
    op = _operator(op, average)
    reduced: list[Tensor] = begin_allreduce(
        tensors, tensors, name, op, prescale_factor, postscale_factor, process_set, False
    ).wait()
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
    """Return the tensors' reductions over all ranks, by default averages: new tensors, reduced as one operation.

    Gradients are reduced in the same way.
    """
    op = _operator(op, average)
    return _compressed(_Allreduce, tensors, compression, name, op, prescale_factor, postscale_factor, process_set)


allreduce_async = _of_one(grouped_allreduce_async)
allreduce_async_ = _of_one(grouped_allreduce_async_)
allreduce_ = _of_one(grouped_allreduce_)
allreduce = _of_one(grouped_allreduce)


def _operator(op: str | None, average: bool | None) -> str:
    if average is not None:
        if op is not None:
            raise ValueError("pass op= or average=, not both: average is the former name of op")
        return Average if average else Sum
    return Average if op is None else op


def _compressed(function: Any, tensors: Sequence[Tensor], compression: Any, *arguments: Any) -> list[Tensor]:
    """Call an autograd function with the tensors in compressed form."""
    compressed, contexts = zip(*[compression.compress(tensor) for tensor in tensors], strict=True)
    reduced = _apply(function, *arguments, *compressed)
    return [compression.decompress(tensor, ctx) for tensor, ctx in zip(reduced, contexts, strict=True)]


def begin_allreduce(
    tensors: Sequence[Tensor],
    outputs: Sequence[Tensor],
    name: str | None,
    op: str,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    background: bool,
    members: tuple[str, ...] = (),
) -> Handle:
    """Submit an allreduce. members: the names of the parameters in a bucket of gradients; for the rest see `_begin`."""
    return _begin(
        "allreduce",
        tensors,
        outputs,
        name,
        process_set,
        background,
        dtypes=NUMBERS,
        op=check_operator(op, process_set),
        prescale=float(prescale),  # of whatever type of number a script passes
        postscale=float(postscale),
        members=members,
    )


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: Any, op: Any, prescale: Any, postscale: Any, process_set: Any, *tensors: Tensor) -> Any:
        ctx.options = (op, prescale, postscale, process_set)
        outputs = [torch.empty_like(tensor) for tensor in tensors]
        handle = begin_allreduce(tensors, outputs, name, op, prescale, postscale, process_set, False)
        return tuple(handle.wait())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (None, None, None, None, None, *_apply(_Allreduce, None, *ctx.options, *gradients))


# --- allgather -------------------------------------------------------------------------------------------------------


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin one allgather of several tensors; `synchronize` returns a list of new tensors.

    Each result holds every rank's rows, one rank after the other. Ranks may have different numbers of rows.
    """
    return _begin("allgather", tensors, (), name, process_set, True, rows_differ=True)


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Return every rank's rows of each tensor, one rank after the other; one operation.

    Gradients are averaged, and each rank gets those of its rows.
    """
    return list(_apply(_Allgather, name, process_set, *tensors))


allgather_async = _of_one(grouped_allgather_async)
allgather = _of_one(grouped_allgather)


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: Any, process_set: Any, *tensors: Tensor) -> Any:
        ctx.rows = [len(tensor) if tensor.dim() else 1 for tensor in tensors]
        ctx.shapes = [tensor.shape for tensor in tensors]
        ctx.process_set = process_set
        return tuple(_begin("allgather", tensors, (), name, process_set, False, rows_differ=True).wait())

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


# --- broadcast -------------------------------------------------------------------------------------------------------


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin a broadcast; `synchronize` returns a new tensor with the root's values. root_rank: a rank of the job."""
    return _first(_broadcast([tensor], [torch.empty_like(tensor)], root_rank, name, process_set, True))


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """As `broadcast_async`, but replaces the values of the tensor itself."""
    given = [tensor]
    return _first(_broadcast(given, given, root_rank, name, process_set, True))


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Replace the tensor's values by the root's. Returns the tensor."""
    broadcast_all([tensor], root_rank, name, process_set)
    return tensor


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the root's tensor as a new tensor.

    The root's gradient is the average of all ranks' gradients. On the other ranks the gradient is zero.
    """
    roots: Tensor = _apply(_Broadcast, tensor, root_rank, name, process_set)
    return roots


def broadcast_all(
    tensors: Sequence[Tensor], root_rank: int, name: str | None, process_set: ProcessSet = global_process_set
) -> None:
    """Replace the tensors' values by the root's, as one operation. Small tensors are packed."""
    if tensors:
        _broadcast(tensors, tensors, root_rank, name, process_set, False).wait()


def _broadcast(
    tensors: Sequence[Tensor],
    outputs: Sequence[Tensor],
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    background: bool,
) -> Handle:
    process_set.engine()  # raises first if this rank is not in the set
    root = process_set.root(root_rank)
    return _begin("broadcast", tensors, outputs, name, process_set, background, root=root)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: Any, process_set: Any) -> Any:
        ctx.options = (root_rank, process_set)
        return _broadcast([tensor], [torch.empty_like(tensor)], root_rank, name, process_set, False).wait()[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        root_rank, process_set = ctx.options
        reduced = allreduce(gradient.contiguous(), op=Average, process_set=process_set)
        if process_set.rank() != process_set.root(root_rank):
            reduced = torch.zeros_like(reduced)
        return reduced, None, None, None


# --- alltoall --------------------------------------------------------------------------------------------------------


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin an alltoall; `synchronize` returns the received rows, and how many came from each rank (int32)."""
    return _alltoall(tensor, splits, name, process_set, True)


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send splits[r] rows to rank r, by default the same number to each rank. Return the received rows, by rank.

    With `splits`, return also how many rows came from each rank. Gradients are sent back to the ranks of the rows.
    """
    received, rows = _apply(_Alltoall, tensor, splits, name, process_set)
    return received if splits is None else (received, rows)


def _alltoall(tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet, background: bool) -> Handle:
    size = process_set.engine().size
    rows = len(tensor) if tensor.dim() else 1
    like = splits if isinstance(splits, Tensor) else torch.empty(0, dtype=torch.int32)
    if like.is_floating_point():
        raise ValueError(f"alltoall: splits must be whole numbers, not {like.dtype}")
    if splits is None and rows % size:
        raise ValueError(f"alltoall: {rows} rows cannot be split equally among {size} ranks; pass splits")
    counts = [rows // size] * size if splits is None else [int(count) for count in splits]
    if len(counts) != size or sum(counts) > rows or min(counts) < 0:
        raise ValueError(
            f"alltoall: splits {counts} must be {size} numbers, none negative, whose sum is at most the tensor's "
            f"{rows} rows"
        )
    handle = _begin("alltoall", [tensor], (), name, process_set, background, rows_differ=True, splits=counts)
    handle.form = lambda results: (results[0], like.new_tensor(handle.received))
    return handle


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Any, name: Any, process_set: Any) -> Any:
        received, rows = _alltoall(tensor, splits, name, process_set, False).wait()
        ctx.rows, ctx.process_set, ctx.shape = rows, process_set, tensor.shape
        ctx.mark_non_differentiable(rows)
        return received, rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *unused: Any) -> Any:
        back, _ = alltoall(gradient.contiguous(), ctx.rows, process_set=ctx.process_set)
        if back.shape != ctx.shape:  # the last rows were sent to no rank
            back = torch.cat([back, back.new_zeros((ctx.shape[0] - len(back), *ctx.shape[1:]))])
        return back, None, None, None


# --- reducescatter ---------------------------------------------------------------------------------------------------


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begin one reducescatter of several tensors; `synchronize` returns this rank's rows of each reduction."""
    return _reducescatter(tensors, name, op, process_set, prescale_factor, postscale_factor, True)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Return this rank's rows of the tensors' reductions over all ranks; one operation.

    If the rows do not divide by the ranks, the first ranks get one row more.
    """
    return _compressed(_Reducescatter, tensors, compression, name, op, process_set, prescale_factor, postscale_factor)


reducescatter_async = _of_one(grouped_reducescatter_async)
reducescatter = _of_one(grouped_reducescatter)


def _reducescatter(
    tensors: Sequence[Tensor],
    name: str | None,
    op: str,
    process_set: ProcessSet,
    prescale: float,
    postscale: float,
    background: bool,
) -> Handle:
    if op == Adasum:
        raise NotImplementedError("reducescatter takes no Adasum, here as in Horovod")
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError("reducescatter: a tensor without dimensions has no rows to scatter")
    return _begin(
        "reducescatter",
        tensors,
        (),
        name,
        process_set,
        background,
        dtypes=NUMBERS,
        op=check_operator(op, process_set),
        prescale=float(prescale),
        postscale=float(postscale),
    )


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: Any, op: Any, process_set: Any, prescale: Any, postscale: Any, *tensors: Tensor) -> Any:
        ctx.options = (op, process_set, prescale * postscale)
        return tuple(_reducescatter(tensors, name, op, process_set, prescale, postscale, False).wait())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        op, process_set, factor = ctx.options
        if op == Sum:  # Horovod's convention: gradients are averages over the ranks
            factor *= process_set.size()
        scaled = [gradient * factor for gradient in gradients]
        return (None, None, None, None, None, *grouped_allgather(scaled, process_set=process_set))


# --- sparse tensors --------------------------------------------------------------------------------------------------


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: str, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Begin an allreduce of a sparse tensor, by Sum or Average: an allgather of all ranks' indices and values.

    Returns a function that waits and returns the sparse result. Its entries may repeat (`coalesce`).
    """
    if op not in (Average, Sum):
        raise ValueError(f"sparse tensors can be added and averaged, and not reduced by {op}")
    given = tensor.coalesce()
    indices = allgather_async(given.indices().t().contiguous(), name and f"{name}.indices", process_set)
    values = allgather_async(given.values(), name and f"{name}.values", process_set)

    def wait() -> Tensor:
        where, what = synchronize(indices), synchronize(values)
        if op == Average:
            what = what / process_set.engine().size
        return torch.sparse_coo_tensor(where.t(), what, tensor.size(), check_invariants=False)

    return wait
