"""Turn torch's calls into calls of a `Group`: dtype, reduction, and contiguous memory for every tensor."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ReduceOp

from netfold.communicator import Group
from netfold.communicator.group import ELEMENTS, REDUCE_OPS
from netfold.torch.forwarding import seconds_of
from netfold.torch.memory import check, outgoing, packed, unpacking, writing_back

Tensor = torch.Tensor

DTYPE_NAMES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.uint32: "u32",
    torch.uint64: "u64",
    torch.bool: "bool",
}
# Types that only travel, and those that are reduced as another dtype, by netfold's names.
_CARRIED_NAMES = {
    torch.complex32: "c32",
    torch.complex64: "c64",
    torch.complex128: "c128",
} | {
    dtype: name
    for name in ELEMENTS
    if name.startswith("float") and (dtype := getattr(torch, name, None)) is not None  # older torch lacks some
}
# Small ones of several calls that are one to torch share an operation. It costs more time than to copy their values.
_BATCHED_BYTES = 64 << 10  # of one call's tensors, at most
_BATCH_BYTES = 4 << 20  # of all that share an operation
_BITWISE = ("band", "bor", "bxor")


class Reduction(NamedTuple):
    """A `ReduceOp` in netfold's terms. factor: each rank multiplies its own input by it first (premul_sum)."""

    name: str
    average: bool = False
    factor: Any = None


# Every call looks up here: a ReduceOp hashes by its kind and equals its kind.
_REDUCTIONS = {
    ReduceOp(getattr(dist.ReduceOp, name.upper())): Reduction(name)
    for name in ("sum", "product", "min", "max", *_BITWISE)
} | {ReduceOp(dist.ReduceOp.AVG): Reduction("sum", average=True)}

# Native codes for the fast path of Operations.allreduce. A ReduceOp's hash is the number of its kind, which is
# unique; a comparison of ReduceOps would cost as much as the native call.
DTYPE_CODES = {dtype: ELEMENTS[name] for dtype, name in DTYPE_NAMES.items()}
REDUCE_CODES = {
    hash(op): (REDUCE_OPS[each.name], each.average) for op, each in _REDUCTIONS.items() if each.name not in _BITWISE
}


@dataclass(eq=False, slots=True)
class Prepared:
    """A call whose tensors are contiguous, on the CPU or on one device. Keeps the tensors alive."""

    kind: str
    dtype: str = "u8"
    reduce: str = "sum"
    average: bool = False
    root: int = 0
    inputs: Sequence[Tensor] = ()
    outputs: Sequence[Tensor] = ()
    finish: Callable[[], Any] | None = None  # copies staged results back
    coalesced: int = 0  # as of Group.submit

    def submit(self, group: Group, timeout_s: float | None, *, wait_here: bool) -> Any:
        return group.submit(
            self.kind,
            dtype=self.dtype,
            reduce=self.reduce,
            average=self.average,
            root=self.root,
            inputs=[(tensor.data_ptr(), tensor.nbytes) for tensor in self.inputs],
            outputs=[(tensor.data_ptr(), tensor.nbytes) for tensor in self.outputs],
            owner=self,
            timeout_s=timeout_s,
            wait_here=wait_here,
            coalesced=self.coalesced,
        )


def copy_call(kind: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], root: int = 0) -> Prepared:
    """A call that moves bytes unchanged. It names the dtype, so that ranks with different dtypes get an error."""
    for tensor in (*inputs, *outputs):
        check(tensor)
    staged = [outgoing(tensor) for tensor in outputs]
    tensors = inputs or outputs
    return Prepared(
        kind,
        dtype=element_name(tensors[0]) if tensors else "u8",
        root=root,
        inputs=[outgoing(tensor) for tensor in inputs],
        outputs=staged,
        finish=writing_back(zip(outputs, staged, strict=True)),
    )


def reduction_call(kind: str, tensor: Tensor, op: Any, *, root: int = 0, result_here: bool = True) -> Prepared:
    """all_reduce and reduce, in place. result_here: this rank's tensor takes the result."""
    reduction = reduction_of(op)
    staged = _scaled(tensor, reduction)
    real = _real(staged, reduction)
    return Prepared(
        kind,
        dtype=_dtype(tensor),
        reduce=reduction.name,
        average=reduction.average,
        root=root,
        outputs=[real],
        finish=writing_back([(tensor, staged)]) if result_here else None,
    )


def reduce_scatter(output: Tensor, parts: Sequence[Tensor], op: Any, rank: int) -> Prepared:
    """parts: one a rank, each of the size of that rank's output."""
    reduction = reduction_of(op)
    check(output)
    if parts[rank].numel() != output.numel():
        raise ValueError(
            f"reduce_scatter: this rank's input has {parts[rank].numel()} elements, its output {output.numel()}"
        )
    for part in parts:
        if part.dtype != output.dtype:
            raise ValueError(f"reduce_scatter: inputs are {part.dtype}, the output {output.dtype}")
    staged = outgoing(output)
    real = _real(staged, reduction)
    return Prepared(
        "reduce_scatter",
        dtype=_dtype(output),
        reduce=reduction.name,
        average=reduction.average,
        inputs=[_real(_scaled(part, reduction), reduction) for part in parts],
        outputs=[real],
        finish=writing_back([(output, staged)]),
    )


def all_reduces(tensors: Sequence[Tensor], op: Any, *, merges: bool) -> list[Prepared]:
    """The calls of one all_reduce of several tensors. merges: small tensors may share a call."""
    prepared = []
    for batch in _batches([[tensor] for tensor in tensors], merges=merges):
        own = [tensors[at] for at in batch]
        if len(own) == 1:
            prepared.append(reduction_call("all_reduce", own[0], op))
            continue
        whole = packed(own)
        call = reduction_call("all_reduce", whole, op)
        prepared.append(_of_batch(call, [own], [(own, whole)]))
    return prepared


def all_gathers(
    parts: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], rank: int, *, merges: bool
) -> list[Prepared]:
    """As `all_reduces`. parts: for each input, one output a rank."""
    prepared = []
    merges = merges and all(_is_like(own, each[rank]) for own, each in zip(inputs, parts, strict=True))
    for batch in _batches(parts, merges=merges):
        if len(batch) == 1:
            prepared.append(copy_call("all_gather", [inputs[batch[0]]], parts[batch[0]]))
            continue
        by_rank_ = [list(each) for each in zip(*(parts[at] for at in batch), strict=True)]
        own = packed([inputs[at] for at in batch])
        wholes = [own.new_empty(sum(tensor.numel() for tensor in each)) for each in by_rank_]
        call = copy_call("all_gather", [own], wholes)
        prepared.append(_of_batch(call, by_rank_, zip(by_rank_, wholes, strict=True)))
    return prepared


def reduce_scatters(
    outputs: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], op: Any, rank: int, *, merges: bool
) -> list[Prepared]:
    """As `all_reduces`. parts: for each output, one input a rank."""
    prepared = []
    merges = merges and all(_is_like(own, each[rank]) for own, each in zip(outputs, parts, strict=True))
    for batch in _batches(parts, merges=merges):
        if len(batch) == 1:
            prepared.append(reduce_scatter(outputs[batch[0]], parts[batch[0]], op, rank))
            continue
        by_rank_ = [list(each) for each in zip(*(parts[at] for at in batch), strict=True)]
        inputs = [packed(each) for each in by_rank_]
        own = torch.empty_like(inputs[rank])
        call = reduce_scatter(own, inputs, op, rank)
        prepared.append(_of_batch(call, by_rank_, [([outputs[at] for at in batch], own)]))
    return prepared


def _batches(columns: Sequence[Sequence[Tensor]], *, merges: bool) -> list[list[int]]:
    """The calls that become one, by their places.

    columns: for each call, tensors whose sizes are the same on all ranks, so that all ranks decide alike.
    """
    batches: list[list[int]] = []
    dtype, bytes_ = None, 0  # of the last batch; without a dtype no call may join it
    for at, tensors in enumerate(columns):
        small = sum(tensor.nbytes for tensor in tensors) if merges and _is_dense(tensors) else _BATCHED_BYTES + 1
        if small > _BATCHED_BYTES:
            dtype = None
            batches.append([at])
        elif tensors[0].dtype == dtype and bytes_ + small <= _BATCH_BYTES:
            bytes_ += small
            batches[-1].append(at)
        else:
            dtype, bytes_ = tensors[0].dtype, small
            batches.append([at])
    return batches


def _is_dense(tensors: Sequence[Tensor]) -> bool:
    dtype = tensors[0].dtype
    return all(tensor.layout is torch.strided and tensor.dtype == dtype for tensor in tensors)


def _is_like(own: Tensor, part: Tensor) -> bool:
    return own.layout is part.layout and own.dtype == part.dtype and own.numel() == part.numel()


def _of_batch(
    call: Prepared, columns: Sequence[Sequence[Tensor]], results: Iterable[tuple[Sequence[Tensor], Tensor]]
) -> Prepared:
    """The call, which serves all tensors of a batch. Ranks whose tensors have other sizes get an error.

    columns: tensors whose sizes are the same on all ranks. results: the tensors that memory's values go to.
    """
    sizes = array("Q", (tensor.numel() for each in columns for tensor in each))
    digest = hashlib.blake2b(sizes.tobytes(), digest_size=4).digest()
    call.coalesced = int.from_bytes(digest, "little") or 1
    first, unpacks = call.finish, [unpacking(tensors, memory) for tensors, memory in results]

    def finish() -> None:
        for each in unpacks if first is None else (first, *unpacks):
            each()

    call.finish = finish
    return call


def copy_overlapped(call: Prepared) -> None:
    """Clone the inputs of a call on device memory that an output overlaps by a part.

    Such calls run in chunks: a chunk's results would replace values of a later chunk. The same memory as an input and
    an output is safe, since each chunk is read before its results are written.
    """

    def overlaps(tensor: Tensor, output: Tensor) -> bool:
        begin, other = tensor.data_ptr(), output.data_ptr()
        meets = begin < other + output.nbytes and other < begin + tensor.nbytes
        return meets and (begin, tensor.nbytes) != (other, output.nbytes)

    if call.kind != "all_reduce":  # its input is a residual, which is a result too
        call.inputs = [
            each.clone() if any(overlaps(each, output) for output in call.outputs) else each for each in call.inputs
        ]


def by_rank(whole: Tensor, part: Tensor, size: int) -> list[Tensor]:
    """Split `whole` into one flat view a rank, each of `part`'s size."""
    if whole.numel() != part.numel() * size or whole.dtype != part.dtype:
        raise ValueError(
            f"a tensor of {whole.numel()} {whole.dtype} is not {size} times one of {part.numel()} {part.dtype}"
        )
    if not whole.is_contiguous():
        raise ValueError("the tensor that holds every rank's part must be contiguous")
    flat = whole.view(-1)
    return [flat.narrow(0, rank * part.numel(), part.numel()) for rank in range(size)]


def by_splits(tensor: Tensor, splits: list[int], size: int) -> list[Tensor]:
    """Split `tensor`'s rows as all_to_all_single does: evenly if `splits` is empty."""
    if not tensor.dim():
        raise ValueError("all_to_all_single: a tensor of no dimensions has no rows to split")
    rows = tensor.size(0)
    if not splits:
        if rows % size:
            raise ValueError(f"all_to_all_single: {rows} rows do not divide by {size} ranks")
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows or min(splits) < 0:
        raise ValueError(f"all_to_all_single: splits {splits} do not cover {rows} rows on {size} ranks")
    return list(torch.split(tensor, splits))


def reduction_of(op: Any) -> Reduction:
    found = _REDUCTIONS.get(op)
    if found is not None:
        return found
    if op == dist.ReduceOp.PREMUL_SUM:
        # Python can read the factor only from a ReduceOp's state for pickling.
        return Reduction("sum", factor=op.__getstate__()[1])
    raise ValueError(f"netfold does not reduce by {op}")


def as_list(tensors: Any) -> list[Tensor]:
    """torch's methods take a tensor in place of a list of one."""
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def with_op(opts: Any, op: Any) -> Any:
    """torch's methods take a ReduceOp in place of options."""
    if op is not None:
        opts.reduceOp = ReduceOp(op) if not isinstance(op, ReduceOp) else op
    return opts


def with_root(opts: Any, root: int) -> Any:
    opts.rootRank = root
    return opts


def timeout_of(opts: Any) -> float | None:
    """The timeout of a call's options in seconds; None if the call has none."""
    return seconds_of(getattr(opts, "timeout", None))


def element_name(tensor: Tensor) -> str:
    """netfold's name for the elements of a tensor that is moved. ValueError for those that it does not move."""
    name = DTYPE_NAMES.get(tensor.dtype) or _CARRIED_NAMES.get(tensor.dtype)
    if name is None:
        advice = "; send int_repr(), and the scale and zero point beside it" if tensor.is_quantized else ""
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in (*DTYPE_NAMES, *_CARRIED_NAMES))
        raise ValueError(f"netfold does not send tensors of {tensor.dtype}{advice}. It sends {known}")
    return name


def _real(staged: Tensor, reduction: Reduction) -> Tensor:
    """View complex numbers as pairs of real ones, which add independently."""
    if not staged.is_complex():
        return staged
    if reduction.name != "sum":
        raise ValueError(f"{reduction.name} is not defined for {staged.dtype}")
    return torch.view_as_real(staged.detach())


def _scaled(tensor: Tensor, reduction: Reduction) -> Tensor:
    """The memory of this rank's input, multiplied by the reduction's factor."""
    check(tensor)
    staged = outgoing(tensor)
    if reduction.factor is None:
        return staged
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"premul_sum takes floating-point tensors, not {tensor.dtype}")
    factor = reduction.factor
    if isinstance(factor, torch.Tensor):
        if factor.numel() != 1:
            raise ValueError(f"premul_sum takes one factor a rank, not {factor.numel()}")
        factor = factor.item()
    scaled: Tensor = staged.detach() * factor
    return scaled


def _dtype(tensor: Tensor) -> str:
    name = _CARRIED_NAMES.get(tensor.dtype) if tensor.is_complex() else DTYPE_NAMES.get(tensor.dtype)
    if name is None:
        raise ValueError(f"netfold cannot reduce {tensor.dtype}; it can {', '.join(map(str, DTYPE_NAMES))} and complex")
    return name
