"""all_reduce of sparse tensors: every rank gathers everybody's non-zero elements and adds them up itself.

How many elements each rank has must be known before they can travel, so that the first of the two rounds is waited for
by the caller, also when the operation is asynchronous.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from netfold.torch import calls

if TYPE_CHECKING:
    from netfold.torch.operations import Operations, Work

Tensor = torch.Tensor


def all_reduce(group: Operations, tensor: Tensor, opts: Any) -> Work | None:
    """`tensor`: COO on every rank, of one shape and dtype; the number of elements may differ. sum and avg."""
    if tensor.layout is not torch.sparse_coo:
        raise ValueError(f"all_reduce takes dense and COO tensors, this one is {tensor.layout}")
    asked = calls.reduction_of(opts.reduceOp)
    if asked.name != "sum":
        raise ValueError(f"all_reduce of sparse tensors takes SUM and AVG, not {asked.name}")
    own = tensor.detach().coalesce()
    if asked.factor is not None:
        own = own * asked.factor
    size = group.netfold.size
    shape = torch.tensor([own._nnz(), own.sparse_dim(), own.dense_dim(), *own.shape], dtype=torch.int64)
    shapes = [torch.empty_like(shape) for _ in range(size)]
    group.wait_for(calls.copy_call("all_gather", [shape], shapes), opts)
    for rank, theirs in enumerate(shapes):
        if not torch.equal(theirs[1:], shape[1:]):
            raise ValueError(
                f"all_reduce: this rank's sparse tensor has shape {tuple(own.shape)} with {own.sparse_dim()} sparse "
                f"dimensions, rank {rank}'s {tuple(theirs[3:].tolist())} with {int(theirs[1])}"
            )
    counts = [int(theirs[0]) for theirs in shapes]
    indices = [own.indices().new_empty(own.sparse_dim(), count) for count in counts]
    values = [own.values().new_empty(count, *own.values().shape[1:]) for count in counts]
    gathered = [
        calls.copy_call("all_gather", [own.indices()], indices),
        calls.copy_call("all_gather", [own.values()], values),
    ]

    def add_up() -> None:
        total = torch.sparse_coo_tensor(torch.cat(indices, 1), torch.cat(values), tensor.shape, check_invariants=False)
        with torch.no_grad():
            tensor.copy_(total.coalesce() / size if asked.average else total.coalesce())

    if group.devices is not None and group._on_device(values):
        # In the caller's own stream: what it is to free later must have been made there.
        work = group.devices.submit(gathered, [tensor], calls.timeout_of(opts))
        work.wait()
        add_up()
        work.extended()
        return group._handed_out(work)
    gathered[1].finish = add_up  # tensors made here are contiguous: nothing was to be copied back
    return group._together(gathered, [tensor], opts)
