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
        total = torch.sparse_coo_tensor(torch.cat(indices, 1), torch.cat(values), tensor.shape, check_invariants=False)
        write(tensor, total.coalesce() / size if reduction.average else total.coalesce())

    if group.devices is not None and group._on_device(values):
        # Add up in the caller's stream: the allocator returns memory to the stream that allocated it.
        work = group.devices.submit(gathered, [tensor], calls.timeout_of(opts))
        work.wait()
        add_up()
        work.extended()
        return group._handed_out(work)
    gathered[1].finish = add_up  # the outputs are contiguous, so this replaces no copy back
    return group._together(gathered, [tensor], opts)
