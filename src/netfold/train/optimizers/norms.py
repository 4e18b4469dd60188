"""Norms of whole tensors, parts of which lie on several ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """What of a tensor lies here: the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def pieces(tensor: Tensor) -> int:
    """How many pieces the whole tensor was cut into. Must not be a sum that is still to be taken (`settle`)."""
    if not isinstance(tensor, DTensor):
        return 1
    count = 1
    for dimension, placement in enumerate(tensor.placements):
        count *= 1 if placement.is_replicate() else tensor.device_mesh.size(dimension)
    return count


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


def whole_norms(tensors: Sequence[Tensor]) -> list[float]:
    """The 2-norm of each tensor as a whole, the same on every rank that holds a part of it.

    One all_reduce of at most 8 bytes a tensor for each axis of ranks along which any is cut, none where none is. All
    ranks of such an axis must call with parts of the same tensors, in the same order.
    """
    sums = torch.stack([square_sum(tensor) for tensor in tensors]) if tensors else torch.zeros(0, dtype=torch.float64)
    cut: dict[dist.ProcessGroup, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, DTensor):
            for dimension, placement in enumerate(tensor.placements):
                if not placement.is_replicate() and tensor.device_mesh.size(dimension) > 1:
                    cut.setdefault(tensor.device_mesh.get_group(dimension), []).append(index)
    for group, indices in cut.items():
        chosen = torch.tensor(indices, device=sums.device)
        of_group = sums[chosen]
        dist.all_reduce(of_group, group=group)
        sums[chosen] = of_group
    norms: list[float] = sums.sqrt().tolist()
    return norms
