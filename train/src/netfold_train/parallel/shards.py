"""Parts of tensors that are cut among ranks, which are DTensors: their gradients, and norms of the whole tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextlib.contextmanager
def exchanged(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Inside, the tensors of each pair have each other's values. Needs a copy of one tensor at a time."""
    _exchange(pairs)
    try:
        yield
    finally:
        _exchange(pairs)


@torch.no_grad()
def _exchange(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for first, second in pairs:
        held = first.clone()
        first.copy_(second)
        second.copy_(held)


def axes(parameter: Tensor) -> list[dist.ProcessGroup]:
    """The groups of ranks among which the whole parameter was cut, one for each axis."""
    if not isinstance(parameter, DTensor):
        return []
    mesh = parameter.device_mesh
    return [
        mesh.get_group(dimension)
        for dimension, placement in enumerate(parameter.placements)
        if not placement.is_replicate() and mesh.size(dimension) > 1
    ]


def settle(parameters: Iterable[nn.Parameter]) -> None:
    """Give every gradient the placements of its parameter.

    Under tensor parallelism a gradient may be a partial sum, whose norm is meaningless. Collective over the ranks that
    hold such a parameter; free if there is none.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
            continue
        if gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def square_sum(tensor: Tensor) -> Tensor:
    """The sum of squares of this rank's elements: f64, no dimensions."""
    norm: Tensor = torch.linalg.vector_norm(local(tensor).detach(), dtype=torch.float64)
    return norm.square()


def whole_norms(tensors: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[float]:
    """The 2-norm of each whole tensor, the same on every rank that holds a part of it.

    parameters: for each tensor one that is cut alike. Cost: for each axis that cuts any tensor, one all_reduce
    of 8 bytes for each such tensor. All ranks of the axis must pass parts of the same tensors, in the same order.
    """
    sums = torch.stack([square_sum(tensor) for tensor in tensors]) if tensors else torch.zeros(0, dtype=torch.float64)
    along: dict[dist.ProcessGroup, list[int]] = {}
    for index, parameter in enumerate(parameters):
        for group in axes(parameter):
            along.setdefault(group, []).append(index)
    for group, indices in along.items():
        chosen = torch.tensor(indices, device=sums.device)
        of_group = sums[chosen]
        dist.all_reduce(of_group, group=group)
        sums[chosen] = of_group
    norms: list[float] = sums.sqrt().tolist()
    return norms
