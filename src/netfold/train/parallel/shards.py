"""The part of a whole parameter that this rank holds: the source of `Replica.as_shard`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Size, Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement


class Shards:
    """The parameters that were cut, by their names in the whole model. All other parameters are whole."""

    def __init__(self) -> None:
        self._parts: dict[str, tuple[DeviceMesh, Sequence[Placement], Size]] = {}

    def add(self, name: str, mesh: DeviceMesh, placements: Sequence[Placement], shape: Size) -> None:
        """shape: of the whole parameter, which parts of unequal size do not determine."""
        self._parts[name] = mesh, placements, shape

    def of(self, name: str, tensor: Tensor) -> Tensor:
        """`tensor` as this rank's part of parameter `name`, sharing its memory. No communication."""
        if name not in self._parts or isinstance(tensor, DTensor):
            return tensor
        mesh, placements, shape = self._parts[name]
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(tensor, mesh, placements, run_check=False, shape=shape, stride=stride)
