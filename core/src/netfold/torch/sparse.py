"""all_reduce of sparse tensors: every rank gathers the non-zero elements of all ranks and adds them up.

A first round gathers each rank's number of elements. The caller waits for it even if the operation is asynchronous.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from netfold.torch import calls
from netfold.torch.memory import writable, write

if TYPE_CHECKING:
    from netfold.torch.operations import Operations, Work

Tensor = torch.Tensor


def all_reduce(group: Operations, tensor: Tensor, opts: Any) -> Work | None:
    """Reduce `tensor` by SUM or AVG. COO on every rank, of one shape and dtype; the number of elements may differ."""
    if tensor.layout is not torch.sparse_coo:
        raise ValueError(f"all_reduce takes dense and COO tensors, this one is {tensor.layout}")
    reduction = calls.reduction_of(opts.reduceOp)
    if reduction.name != "sum":
        raise ValueError(f"all_reduce of sparse tensors takes SUM and AVG, not {reduction.name}")
    with writable():  # torch cannot coalesce an inference tensor outside of it
        own = tensor.detach().coalesce()
        if reduction.factor is not None:
            own = own * reduction.factor
    size = group.netfold.size
    shape = torch.tensor([own._nnz(), own.sparse_dim(), own.dense_dim(), *own.shape], dtype=torch.int64, device="cpu")
    shapes = [torch.empty_like(shape) for _ in range(size)]
    group.wait_for(calls.copy_call("all_gather", [shape], shapes), opts)
    for rank, of_rank in enumerate(shapes):
        if not torch.equal(of_rank[1:], shape[1:]):
            raise ValueError(
                f"all_reduce: this rank's sparse tensor has shape {tuple(own.shape)} with {own.sparse_dim()} sparse "
                f"dimensions, rank {rank}'s {tuple(of_rank[3:].tolist())} with {int(of_rank[1])}"
            )
    counts = [int(of_rank[0]) for of_rank in shapes]
    indices = [own.indices().new_empty(own.sparse_dim(), count) for count in counts]
    values = [own.values().new_empty(count, *own.values().shape[1:]) for count in counts]
    gathered = [
        calls.copy_call("all_gather", [own.indices()], indices),
        calls.copy_call("all_gather", [own.values()], values),
    ]

    def add_up() -> None:
        terms = torch.cat(values)
        wide = terms.float() if terms.dtype in (torch.float16, torch.bfloat16) else terms
        # An average adds terms that cannot overflow, as the native engine (kernels/reduce.hpp).
        scale = 0.5 ** (size - 1).bit_length() if reduction.average and not _is_integer(wide) else 1.0
        total = torch.sparse_coo_tensor(
            torch.cat(indices, 1), wide * scale if scale != 1.0 else wide, tensor.shape, check_invariants=False
        ).coalesce()
        if reduction.average:
            sums = total.values()
            divisor = sums.new_full((), size * scale)  # a Python number would be inverted and rounded first
            sums.copy_(torch.div(sums, divisor, rounding_mode="trunc" if _is_integer(sums) else None))
        write(tensor, total.to(tensor.dtype))

    if group.devices is not None and group._on_device(values):
        # Add up in the caller's stream: the allocator returns memory to the stream that allocated it.
        work = group.devices.submit(gathered, [tensor], calls.timeout_of(opts))
        work.wait()
        add_up()
        work.extended()
        return group._handed_out(work)
    gathered[1].finish = add_up  # the outputs are contiguous, so this replaces no copy back
    return group._together(gathered, [tensor], opts)


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())
