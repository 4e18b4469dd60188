"""Norms of whole tensors, parts of which lie on several ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """What of a tensor lies here: the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def axes(tensor: Tensor) -> list[dist.ProcessGroup]:
    """The groups of ranks among which the whole tensor was cut, one an axis. It must not be a sum that is still to be
    taken (`settle`)."""
    if not isinstance(tensor, DTensor):
        return []
    mesh = tensor.device_mesh
    return [
        mesh.get_group(dimension)
        for dimension, placement in enumerate(tensor.placements)
        if not placement.is_replicate() and mesh.size(dimension) > 1
    ]


def pieces(tensor: Tensor) -> int:
    """How many pieces the whole tensor was cut into; as for `axes`."""
    return math.prod(axis.size() for axis in axes(tensor))


def settle(parameters: Iterable[nn.Parameter]) -> None:
    """Give every gradient the placements of its parameter.

    Under tensor parallelism a rank may hold one that is still a term of a sum: its norm says nothing. Collective over
    the ranks that share such a parameter; costs nothing where there is none.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
            continue
        if gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def square_sum(tensor: Tensor) -> Tensor:
    """Of the elements that lie here: f64, no dimensions."""
    norm: Tensor = torch.linalg.vector_norm(local(tensor).detach(), dtype=torch.float64)
    return norm.square()


def whole_norms(tensors: Sequence[Tensor], cut: Sequence[Sequence[dist.ProcessGroup]]) -> list[float]:
    """The 2-norm of each tensor as a whole, the same on every rank that holds a part of it.

    cut: among which ranks each was (`axes`). One all_reduce of 8 bytes a tensor for each axis that cuts any, none where
    none is cut. All ranks of such an axis must call with parts of the same tensors, in the same order.
    """
    sums = torch.stack([square_sum(tensor) for tensor in tensors]) if tensors else torch.zeros(0, dtype=torch.float64)
    along: dict[dist.ProcessGroup, list[int]] = {}
    for index, groups in enumerate(cut):
        for group in groups:
            along.setdefault(group, []).append(index)
    for group, indices in along.items():
        chosen = torch.tensor(indices, device=sums.device)
        of_group = sums[chosen]
        dist.all_reduce(of_group, group=group)
        sums[chosen] = of_group
    norms: list[float] = sums.sqrt().tolist()
    return norms
