"""Divide the work among the ranks of the data axis, which hold the same layers.

DDP averages gradients in buckets while the backward pass runs. ZeRO (Rajbhandari et al. 2020) divides what each rank
would hold whole, by FSDP2: each rank holds a run of rows of every parameter (a DTensor), its gradient and its optimizer
state. A layer's weights are gathered before it computes. 1 and 2 keep them from the forward to the backward pass. 3
frees them in between and gathers them again: it sends half as much again, and needs less memory. `parallel.shard`
divides among fewer ranks, and the groups of them average (HSDP). Tensor parallelism without ZeRO is the case of one
such rank, since DDP takes no DTensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from netfold_train.models.deferred import Deferred, materialise
from netfold_train.models.model import tied_names
from netfold_train.parallel.mesh import Mesh, all_reduce_together
from netfold_train.parallel.owned import own_parameters
from netfold_train.parallel.precision import Precision, needs_f32
from netfold_train.parallel.shards import local
from netfold_train.recipe import Recipe
from netfold_train.recipe.split import SPLIT_BACKWARD

BUCKET_MB = 64.0
"""Unless the recipe says otherwise. A larger bucket costs fewer collectives; a smaller one is sent earlier."""


def wrap_data_parallel(
    module: nn.Module,
    blocks: Iterable[nn.Module],
    recipe: Recipe,
    mesh: Mesh,
    *,
    averages: bool = True,
    deferred: Deferred | None = None,
) -> nn.Module:
    """A module whose backward pass averages gradients over the data axis, in f32.

    blocks: parts of `module` that ZeRO gathers one by one (`blocks_of`). averages: without it and without ZeRO,
    gradients are this rank's own. deferred: gives this rank's parts of the weights their values, once they are cut.
    Returns a DDP; or the module itself, cut in place or with one data-parallel rank. Parameters keep their names in
    `module`. Collective over the data axis. Raises ValueError.
    """
    # Under [diloco] sites train independently within a round.
    averages = averages and mesh.site.size > 1 and not averages_by_hand(recipe, mesh)
    apart = own_parameters(module)
    has_parts = any(isinstance(each, DTensor) for each in module.parameters() if each not in apart)
    sharded = bool(zero_level(recipe, mesh)) or (averages and has_parts)
    if sharded:
        _shard(module, blocks, mesh, Precision(recipe.training.precision), recipe.parallel.zero, apart)
    if deferred is not None:
        materialise(module, deferred, mesh.device)
    if not averages or sharded:
        return module
    # The ranks of an elastic job are sent the whole state, weights too, when they join.
    return _wrap_ddp(module, mesh, recipe.parallel.bucket_mb or BUCKET_MB, sends=not recipe.fault_tolerance.elastic)


def averages_by_hand(recipe: Recipe, mesh: Mesh) -> bool:
    """Whether the replica averages gradients after the backward pass, because neither DDP nor FSDP2 can.

    zero-bubble schedules set the gradients of weights themselves, and run no hooks. FSDP2, which takes the DTensors of
    tensor parallelism, averages over the whole data axis, and not over one of DiLoCo's sites.
    """
    split_backward = mesh.pipeline.size > 1 and recipe.parallel.schedule in SPLIT_BACKWARD
    return mesh.site.size > 1 and (split_backward or (recipe.diloco is not None and mesh.tensor.size > 1))


def average_gradients(parameters: Iterable[nn.Parameter], mesh: Mesh) -> None:
    """Average what `averages_by_hand`. Collective over the site."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    all_reduce_together(gradients, mesh.site.group, divisor=mesh.site.size)


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


def _wrap_ddp(module: nn.Module, mesh: Mesh, bucket_mb: float, *, sends: bool) -> DistributedDataParallel:
    """`module` under DDP over the data axis, or this rank's site of it; collective over these ranks.

    sends: first give all ranks the weights of the first one.

    Gradients are views of the buckets, and need no other memory. Buffers are not sent before each forward pass:
    training does not read batch norm's statistics, and evaluations broadcast them (`evaluating`).
    """
    apart = own_parameters(module)
    names = [name for name, parameter in module.named_parameters() if parameter in apart]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)  # type: ignore[no-untyped-call]
    ddp = DistributedDataParallel(
        module, process_group=mesh.site.group, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True, init_sync=sends
    )
    # From now on: the constructor has sent them. Torch 2.12 and older have no argument that says so.
    ddp.broadcast_buffers = False
    return ddp


def _shard(
    module: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: Mesh,
    precision: Precision,
    zero: int,
    apart: set[nn.Parameter],
) -> None:
    """Cut the parameters of `module` in place over the data axis; names stay.

    Every forward and backward pass is collective over the data axis from now on. apart: parameters that stay as they
    are.
    """
    # A weight that blocks share must not be cut twice: the module itself cuts it.
    shared = {module.get_parameter(names[0]) for names in tied_names(module)}
    alone = [block for block in blocks if not shared.intersection(block.parameters())]
    # From the inside out.
    exact = [part for part in module.modules() if needs_f32(part)] if precision.name != "f32" else []
    policies = dict.fromkeys([*exact, *alone, module], precision.policy())
    policies.update(dict.fromkeys(exact, MixedPrecisionPolicy(cast_forward_inputs=False)))
    for part, policy in policies.items():
        fully_shard(part, mesh=mesh.fsdp_mesh, reshard_after_forward=zero == 3, mp_policy=policy, ignored_params=apart)
