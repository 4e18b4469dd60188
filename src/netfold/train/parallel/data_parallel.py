"""How the ranks of the data axis, which hold the same layers, share the work on them: one call for a module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from netfold.train.mesh import Mesh
from netfold.train.parallel.buckets import START_MB, wrap_ddp
from netfold.train.parallel.embeddings import exclude_from_ddp
from netfold.train.parallel.zero import shard, zero_level
from netfold.train.precision import Precision
from netfold.train.recipe import Recipe, constraints
from netfold.train.recipe.errors import RecipeError


def wrap_data_parallel(module: nn.Module, recipe: Recipe, mesh: Mesh, *, averages: bool = True) -> nn.Module:
    """`module` in the recipe's precision, its gradients averaged over the data axis, in f32, in its backward pass.

    A DDP, or the module itself, cut in place (ZeRO 2 and 3) or with nobody to share with; without `averages` the latter
    stays as it is, and gradients are this rank's own. Collective over the data
    axis. Parameters have the names that they had, in `module`. Raises ValueError.
    """
    precision, bucket_mb, zero = (
        Precision(recipe.training.precision),
        recipe.parallel.bucket_mb,
        zero_level(recipe, mesh),
    )
    if said := constraints.buckets(recipe.parallel, mesh.data.size):
        raise RecipeError(said)
    if zero >= 2:
        return shard(module, mesh, precision, free_after_forward=zero == 3)
    if precision.name != "f32":
        precision.lend(module)
    # Ranks that train apart take nobody's gradients.
    if mesh.data.size > 1 and averages and recipe.diloco is None:
        exclude_from_ddp(module)
        return wrap_ddp(module, mesh, START_MB if bucket_mb == "auto" else bucket_mb)
    return module


def broadcast_buffers(module: nn.Module, mesh: Mesh) -> None:
    """Make the buffers of `module` those of the first data-parallel rank: batch norms have each seen their own
    share. Collective over the data axis."""
    if mesh.data.size > 1:
        for buffer in module.buffers():
            dist.broadcast(buffer, group=mesh.data.group, group_src=0)


@contextlib.contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Inside, backward passes add up gradients on this rank alone; the next one outside sends their sum."""
    if isinstance(module, DistributedDataParallel):
        with module.no_sync():
            yield
    elif isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            module.set_requires_gradient_sync(True)
    else:
        yield
