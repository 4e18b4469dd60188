"""Optimizers by name. torch's own where it has one; LARS and LAMB, which it has not, are here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from netfold.train.mesh import Mesh
from netfold.train.optimizers.lamb import LAMB
from netfold.train.optimizers.lars import LARS
from netfold.train.optimizers.layerwise import LayerWise
from netfold.train.optimizers.norms import axes, pieces
from netfold.train.parallel.zero import shard_optimizer, zero_level
from netfold.train.recipe import Optimizer, Recipe
from netfold.train.replica import Replica


def make_optimizer(
    replica: Replica, recipe: Recipe, mesh: Mesh, undecayed: Collection[str] = ()
) -> torch.optim.Optimizer:
    """For this rank's parameters; `lr` is set by the trainer before each step.

    undecayed: names of parameters that `weight_decay` leaves alone (`decay.undecayed` of the whole model), unless
    `optimizer.decay` is "all".
    """
    parts = {held: replica.as_shard(name, held.detach()) for name, held in replica.named_parameters()}
    groups = _groups(replica, recipe.optimizer, undecayed)
    kind: Callable[..., torch.optim.Optimizer]
    kind, options = kind_of(recipe.optimizer)
    if kind not in (LARS, LAMB):
        # One call for all parameters: each on a DTensor costs Python some 15 us, and Adam makes ten a parameter.
        options["foreach"] = zero_level(recipe, mesh) >= 2
    if zero_level(recipe, mesh) == 1:
        sizes = {held: part.numel() // pieces(part) for held, part in parts.items()}
        kind = functools.partial(shard_optimizer, kind=kind, mesh=mesh, sizes=sizes)
    made = kind(groups, **options)
    _tell_cuts(made, parts)
    return made


def _groups(replica: Replica, asked: Optimizer, undecayed: Collection[str]) -> list[Any]:
    """The parameters here: one list, or two groups where some have no weight decay."""
    held = list(replica.named_parameters())
    alone = [parameter for name, parameter in held if name in undecayed]
    if not asked.weight_decay or asked.decay == "all" or not alone:
        return [parameter for _, parameter in held]
    rest = [parameter for name, parameter in held if name not in undecayed]
    groups: list[dict[str, Any]] = [{"params": rest}, {"params": alone, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def local_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The one whose `state` holds, under the replica's parameters, what this rank owns of the optimizer's state.

    Of whole parameters' (no ZeRO), of the rows that this rank has (ZeRO 2 and 3: DTensors), or of the parameters that
    are this rank's to step on and no others (ZeRO 1).
    """
    return optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer


def _tell_cuts(optimizer: torch.optim.Optimizer, parts: Mapping[nn.Parameter, Tensor]) -> None:
    """An optimizer that wants norms of whole parameters learns which are parts, and of what."""
    stepping = local_optimizer(optimizer)
    if isinstance(stepping, LayerWise):
        cut = {parameter: axes(part) for parameter, part in parts.items()}
        stepping.cut = {parameter: among for parameter, among in cut.items() if among}


def kind_of(asked: Optimizer) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class, and its keyword arguments: for who makes it of other parameters."""
    decay = {"lr": asked.lr, "weight_decay": asked.weight_decay}
    if asked.name == "sgd":
        return torch.optim.SGD, {**decay, "momentum": asked.momentum}
    if asked.name == "lars":
        return LARS, {**decay, "momentum": asked.momentum, "trust": asked.trust}
    adam = {**decay, "betas": asked.betas, "eps": asked.eps}
    return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "lamb": LAMB}[asked.name], adam
