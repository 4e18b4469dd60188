"""Divide the work among the ranks of the data axis, which hold the same layers.

DDP averages gradients in buckets while the backward pass runs. ZeRO (Rajbhandari et al. 2020) divides what each rank
would hold whole, by FSDP2: each rank holds a run of rows of every parameter (a DTensor), its gradient and its optimizer
state. A layer's weights are gathered before it computes. 1 and 2 keep them from the forward to the backward pass. 3
frees them in between and gathers them again: it sends half as much again, and needs less memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from netfold.train.models.model import Chain, tied_names
from netfold.train.parallel.embeddings import exclude_from_ddp
from netfold.train.parallel.mesh import Mesh
from netfold.train.parallel.precision import Precision, keeps_statistics
from netfold.train.recipe import Recipe

BUCKET_MB = 64.0
"""Unless the recipe says otherwise. A larger bucket costs fewer collectives; a smaller one is sent earlier."""


def wrap_data_parallel(module: nn.Module, recipe: Recipe, mesh: Mesh, *, averages: bool = True) -> nn.Module:
    """`module` in the recipe's precision; its backward pass averages gradients over the data axis, in f32.

    Returns a DDP; or the module itself, cut in place (ZeRO) or with one data-parallel rank. Without `averages` and
    ZeRO, gradients are this rank's own. Parameters keep their names in `module`. Collective over the data axis. Raises
    ValueError.
    """
    precision, zero = Precision(recipe.training.precision), zero_level(recipe, mesh)
    if zero:
        return _shard(module, mesh, precision, free_after_forward=zero == 3)
    precision.use_lower_copies(module)
    # Under [diloco] sites train independently within a round.
    if mesh.site.size > 1 and averages:
        return _wrap_ddp(module, mesh, recipe.parallel.bucket_mb or BUCKET_MB)
    return module


def zero_level(recipe: Recipe, mesh: Mesh) -> int:
    """The recipe's ZeRO level; 0 with one data-parallel rank."""
    return recipe.parallel.zero if mesh.data.size > 1 else 0


@contextlib.contextmanager
def evaluating(modules: Sequence[nn.Module], mesh: Mesh, *, buffers_differ: bool) -> Iterator[None]:
    """Inside, the modules are in evaluation mode, and compute without gradients.

    buffers_differ: copy those of the first data-parallel rank, because each rank's batch norms have seen only their own
    share. Collective over the data axis then.
    """
    for module in modules:
        for buffer in module.buffers() if buffers_differ and mesh.data.size > 1 else ():
            dist.broadcast(buffer, group=mesh.data.group, group_src=0)
        module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in modules:
            module.train()
            # ZeRO 1 and 2 keep gathered weights until a backward pass. Without one, the next pass would compute with
            # weights from before the optimizer's step.
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()


def send_gradients(module: nn.Module, on: bool) -> None:
    """Whether the next backward passes send their gradients' sums, or add them up on this rank alone."""
    if isinstance(module, DistributedDataParallel):
        module.require_backward_grad_sync = on
    elif isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(on)


def _wrap_ddp(module: nn.Module, mesh: Mesh, bucket_mb: float) -> DistributedDataParallel:
    """`module` under DDP over the data axis, or this rank's site of it; collective over these ranks.

    Gradients are views of the buckets, and need no other memory. Buffers are not sent before each forward pass:
    training does not read batch norm's statistics, and evaluations broadcast them (`evaluating`).
    """
    exclude_from_ddp(module)
    ddp = DistributedDataParallel(
        module, process_group=mesh.site.group, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True
    )
    # From now on: the constructor has sent them. Torch 2.12 and older have no argument that says so.
    ddp.broadcast_buffers = False
    return ddp


def _shard(module: nn.Module, mesh: Mesh, precision: Precision, *, free_after_forward: bool) -> nn.Module:
    """Cut the parameters of `module` in place over the data axis; names stay.

    A `Chain` is gathered layer by layer, any other module at once. Every forward and backward pass is collective over
    the data axis from now on.
    """
    layers = []
    if isinstance(module, Chain):
        # A weight that layers share must not be cut twice: the module itself cuts it.
        shared = {name.split(".")[1] for names in tied_names(module) for name in names}
        layers = [layer for name, layer in module.layers.items() if name not in shared]
    # From the inside out. Batch norm computes with f32 weights, whatever the type of its input.
    norms = [part for part in module.modules() if keeps_statistics(part)] if precision.name != "f32" else []
    policies = dict.fromkeys([*norms, *layers, module], precision.policy())
    policies.update(dict.fromkeys(norms, MixedPrecisionPolicy(cast_forward_inputs=False)))
    for part, policy in policies.items():
        fully_shard(part, mesh=mesh.device_mesh["data"], reshard_after_forward=free_after_forward, mp_policy=policy)
    return module
