"""Which part of the whole a parameter here is: what `Replica.as_shard` answers from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Size, Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement


@dataclass(frozen=True)
class _Part:
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: Size
    """Of the whole."""


class Shards:
    """Parameters that were cut, by their names in the whole model. One that was not is the whole."""

    def __init__(self) -> None:
        self._parts: dict[str, _Part] = {}

    def add(self, name: str, mesh: DeviceMesh, placements: Sequence[Placement], shape: Size) -> None:
        """`shape` is the whole's: parts of unequal size do not tell it."""
        self._parts[name] = _Part(mesh, tuple(placements), shape)

    def of(self, name: str, tensor: Tensor) -> Tensor:
        """`tensor` as the part that parameter `name` is here, sharing its memory. No communication."""
        part = self._parts.get(name)
        if part is None or isinstance(tensor, DTensor):
            return tensor
        rows = [1]
        for length in reversed(part.shape[1:]):
            rows.insert(0, rows[0] * length)
        # torch takes a DTensor for one with memory of its own, and copies from address 0, where what it was made of
        # begins in the middle of another tensor's (ZeRO 1's buckets): through DLPack the same memory begins here.
        local = torch.from_dlpack(tensor.detach()) if tensor.storage_offset() else tensor  # type: ignore[attr-defined]
        return DTensor.from_local(
            local, part.mesh, part.placements, run_check=False, shape=part.shape, stride=tuple(rows)
        )
