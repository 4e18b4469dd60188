"""Batch norm over sub-groups of ranks: data-parallel ranks in runs of k normalise as one batch."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from netfold.batch_norm import SharedBatchNorm
from netfold_train.parallel.mesh import Mesh, own_group
from netfold_train.recipe.errors import RecipeError
from netfold_train.recipe.split import check_batch_norm


def convert_batch_norm(module: nn.Module, ranks: int, mesh: Mesh) -> None:
    """Replace every nn.BatchNorm*d inside `module` by a SubGroupBatchNorm over runs of `ranks` data-parallel ranks.

    Parameters and buffers stay the same objects with the same names. Makes groups: collective over the world.
    """
    if problems := check_batch_norm(ranks, mesh.data.size):
        raise RecipeError(problems)
    norms = norms_of(module, ranks)
    # New groups even if the whole data axis is one run: DDP's pending collectives on the axis's own group must not mix
    # with a layer's.
    group = own_group(mesh.runs(ranks))
    for norm in norms:
        SubGroupBatchNorm.of(norm, group)


def norms_of(module: nn.Module, ranks: int) -> list[_BatchNorm]:
    """Every nn.BatchNorm*d inside `module`. Raises ValueError if there is none."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    found: list[_BatchNorm] = [part for part in module.modules() if isinstance(part, kinds)]
    if not found:
        raise ValueError(f"parallel.batch_norm is {ranks}, but the model has no layer of batch norm; leave it at 1")
    return found


class SubGroupBatchNorm(SharedBatchNorm):
    """Batch norm of the batches of all ranks of a group together. DDP averages the gradients of weight and bias."""

    group: dist.ProcessGroup

    @classmethod
    def of(cls, norm: _BatchNorm, group: dist.ProcessGroup) -> SubGroupBatchNorm:
        """Make `norm` itself such a layer, as fully_shard does: its names, tensors and hooks stay."""
        norm.__class__ = cls
        assert isinstance(norm, cls)
        norm.group = group
        return norm

    def gather(self, own: Tensor) -> Tensor:
        everywhere = own.new_empty(self.group.size(), len(own))
        dist.all_gather(list(everywhere.unbind()), own, group=self.group)
        return everywhere

    def add(self, own: Tensor) -> None:
        dist.all_reduce(own, group=self.group)
