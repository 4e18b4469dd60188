"""Ranks as a mesh: pipeline x data x tensor. Neighbours share a tensor, which talks most; stages are furthest apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from netfold.train.recipe import Parallel

AXES = ("pipeline", "data", "tensor")


@dataclass(frozen=True)
class Axis:
    """One direction of the mesh, as this rank sees it."""

    name: str
    rank: int
    size: int
    group: dist.ProcessGroup


class Mesh:
    """The job's ranks, each a place on three axes. Axes of one rank are there too: nothing has to ask."""

    def __init__(self, parallel: Parallel, device: str = "cpu") -> None:
        """Collective over the world, which must have pipeline x data x tensor ranks. Makes the groups."""
        size = dist.get_world_size()
        data = parallel.data or size // (parallel.pipeline * parallel.tensor)
        self.device_mesh: DeviceMesh = init_device_mesh(
            device, (parallel.pipeline, data, parallel.tensor), mesh_dim_names=AXES
        )
        self.pipeline, self.data, self.tensor = (self._axis(name) for name in AXES)

    def island(self) -> dist.ProcessGroup:
        """A new group: the ranks that hold this rank's copy of the model, along pipeline and tensor. Collective over
        the world."""
        own = None
        for ranks in self.device_mesh.mesh.transpose(0, 1).flatten(1).tolist():
            group = dist.new_group(ranks)
            own = group if dist.get_rank() in ranks else own
        assert own is not None
        return cast(dist.ProcessGroup, own)

    def alike(self) -> list[list[int]]:
        """Ranks of the world by what they hold: a list for each place on the other axes, along the data axis."""
        whole = self.device_mesh.mesh
        ranks: list[list[int]] = whole.transpose(1, 2).reshape(-1, whole.shape[1]).tolist()
        return ranks

    def _axis(self, name: str) -> Axis:
        axis = self.device_mesh[name]
        return Axis(name, axis.get_local_rank(), axis.size(), axis.get_group())
