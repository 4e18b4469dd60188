"""Ranks as a mesh: pipeline x data x tensor. Tensor neighbours, which communicate most, have adjacent rank numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import _clear_fast_path_sharding_prop_cache, _clear_python_sharding_prop_cache

from netfold_train.parallel.device import CPU
from netfold_train.recipe import DiLoCo, Parallel

AXES = ("pipeline", "data", "tensor")
T = TypeVar("T")


@dataclass(frozen=True)
class Axis:
    """One direction of the mesh, as this rank sees it."""

    name: str
    rank: int
    size: int
    group: dist.ProcessGroup


class Mesh:
    """The job's ranks on three axes. An axis of one rank has a group too, so callers need no special case."""

    def __init__(self, parallel: Parallel, device: torch.device = CPU, diloco: DiLoCo | None = None) -> None:
        """Make the groups. Collective over the world, which must have pipeline x data x tensor ranks.

        device: this rank's. diloco: divides the data axis into sites.
        """
        # For equal meshes DTensor reuses results that name the groups of the first mesh. In a new world of this process
        # those names are unknown, or are of other groups.
        _clear_python_sharding_prop_cache()  # type: ignore[no-untyped-call]
        _clear_fast_path_sharding_prop_cache()  # type: ignore[no-untyped-call]
        self.device = device
        size = dist.get_world_size()
        data = parallel.data or size // (parallel.pipeline * parallel.tensor)
        shard = parallel.shard or (data if parallel.zero else 1)
        if data > 1 and shard < data and (parallel.zero or (parallel.tensor > 1 and diloco is None)):
            # FSDP2 wants the axes of its mesh, and the tensor axis, to be axes of one mesh.
            shape = (parallel.pipeline, data // shard, shard, parallel.tensor)
            self.device_mesh: DeviceMesh = init_device_mesh(
                device.type, shape, mesh_dim_names=("pipeline", "replicate", "shard", "tensor")
            )
            self.fsdp_mesh = self.device_mesh["replicate", "shard"]
            self.data_mesh = self.device_mesh["replicate"] if shard == 1 else self.fsdp_mesh._flatten("data")
        else:
            self.device_mesh = init_device_mesh(
                device.type, (parallel.pipeline, data, parallel.tensor), mesh_dim_names=AXES
            )
            self.fsdp_mesh = self.data_mesh = self.device_mesh["data"]
        self.ranks = self.device_mesh.mesh.view(parallel.pipeline, data, parallel.tensor)
        """The ranks of the world, [pipeline, data, tensor]."""
        self.pipeline, self.tensor = (_axis(name, self.device_mesh[name]) for name in ("pipeline", "tensor"))
        self.data = _axis("data", self.data_mesh)
        self.context: Axis | None = None
        """The ranks that have parts of this rank's samples, if there are several."""
        self.share, self.shares = self.data.rank, self.data.size
        """A batch's samples are divided into `shares`; this rank has the one of number `share`, or a part of it."""
        if parallel.context > 1:
            # A new group, as for batch norm: collectives of layers must not mix with DDP's.
            group = own_group(self.runs(parallel.context))
            self.shares //= parallel.context
            self.share, place = divmod(self.data.rank, parallel.context)
            self.context = Axis("context", place, parallel.context, group)
        self.site = self.data
        """The part of the data axis whose ranks average gradients in every step: under [diloco] one site, else all."""
        self.between: Axis | None = None
        """Under [diloco], the ranks in the same place of every site. `between.rank` is the site's number."""
        if diloco is not None:
            sites = diloco.sites or data
            if data % sites:
                raise ValueError(f"{data} data-parallel ranks do not divide into {sites} sites (diloco.sites)")
            number, place = divmod(self.data.rank, data // sites)
            # An axis of all data-parallel ranks has their group.
            of_site = self.data.group if sites == 1 else own_group(self.runs(data // sites))
            self.site = Axis("site", place, data // sites, of_site)
            self.between = Axis(
                "between", number, sites, self.data.group if sites == data else own_group(self.counterparts())
            )

    def runs(self, size: int) -> list[list[int]]:
        """The ranks of the world in runs of `size` data-parallel ranks, for each place on the other axes."""
        ranks: list[list[int]] = self.ranks.movedim(1, -1).reshape(-1, size).tolist()
        return ranks

    def same_samples(self) -> dist.ProcessGroup:
        """A new group of the ranks that train on this rank's samples. Collective over the world."""
        shares = self.ranks.reshape(self.pipeline.size, self.shares, -1, self.tensor.size)
        return own_group(shares.transpose(0, 1).flatten(1).tolist())

    def site_ranks(self) -> dist.ProcessGroup:
        """A new group of all ranks of this rank's site. Collective over the world."""
        return own_group(self._places().transpose(0, 1).flatten(1).tolist())

    def counterparts(self) -> list[list[int]]:
        """The ranks of the world in the same place of every site, in the order of sites: a list for each place."""
        ranks: list[list[int]] = self._places().transpose(1, 3).flatten(0, 2).tolist()
        return ranks

    def _places(self) -> Tensor:
        """The ranks of the world as [pipeline, sites, data-parallel ranks of a site, tensor]."""
        return self.ranks.reshape(self.pipeline.size, -1, self.site.size, self.tensor.size)


def _axis(name: str, mesh: DeviceMesh) -> Axis:
    return Axis(name, mesh.get_local_rank(), mesh.size(), mesh.get_group())


def gather(own: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's object, in the order of ranks. Collective over the group, by default the world if there is one."""
    if not dist.is_initialized():
        return [own]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group=group)
    return found


def own_group(ranks: Sequence[list[int]], **options: Any) -> dist.ProcessGroup:
    """Make a group of each list of ranks, and return the group that holds this rank. Collective over the world.

    options: of `torch.distributed.new_group`.
    """
    groups_of: Any = dist.new_subgroups_by_enumeration  # untyped in torch
    return cast(dist.ProcessGroup, groups_of(list(ranks), **options)[0])


def in_runs(tensors: Sequence[Tensor], limit_bytes: int) -> list[list[Tensor]]:
    """The tensors in runs of one dtype and at most `limit_bytes`; a larger tensor is a run of its own."""
    runs: list[list[Tensor]] = list(_take_tensors(tensors, limit_bytes))  # type: ignore[no-untyped-call]
    return runs


def all_reduce_together(tensors: Sequence[Tensor], group: dist.ProcessGroup, divisor: int = 1) -> None:
    """Replace each tensor by its sum over the group, divided by `divisor`: one all_reduce for each dtype.

    Collective over the group; needs one copy of the tensors.
    """
    for same in in_runs(tensors, 2**63):
        flat: Tensor = _flatten_dense_tensors(same)  # type: ignore[no-untyped-call]
        dist.all_reduce(flat, group=group)
        if divisor > 1:
            flat /= divisor
        torch._foreach_copy_(same, _unflatten_dense_tensors(flat, same))  # type: ignore[no-untyped-call]
