"""Optimizers by name. torch's own where it has one; LARS and LAMB, which it has not, are here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from netfold.train.mesh import Mesh
from netfold.train.optimizers.master import MasterWeights
from netfold.train.parallel.zero import shared_out, zero_level
from netfold.train.precision import UNROUNDED
from netfold.train.recipe import Optimizer, Recipe
from netfold.train.replica import Replica


def make_optimizer(replica: Replica, recipe: Recipe, mesh: Mesh) -> torch.optim.Optimizer:
    """For this rank's parameters; `lr` is set by the trainer before each step."""
    parameters = [parameter for _, parameter in replica.named_parameters()]
    kind, options = _named(recipe.optimizer)
    if recipe.training.precision != "f32":
        kind = functools.partial(MasterWeights, inner=kind)
    if zero_level(recipe, mesh) == 1:
        kind = functools.partial(shared_out, kind=kind, mesh=mesh)
    made = kind(parameters, **options)
    for parameter in parameters:
        # What was no rank's to keep goes here.
        vars(parameter).pop(UNROUNDED, None)
    return made


def local_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The one whose `state` holds, under the replica's parameters, what this rank owns of the optimizer's state.

    Of whole parameters' (no ZeRO), of the rows that this rank has (ZeRO 2 and 3: DTensors), or of the parameters that
    are this rank's to step on and no others (ZeRO 1).
    """
    return optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer


def _named(asked: Optimizer) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    if asked.name == "sgd":
        return torch.optim.SGD, {"lr": asked.lr, "momentum": asked.momentum, "weight_decay": asked.weight_decay}
    adam = {"lr": asked.lr, "betas": asked.betas, "eps": asked.eps, "weight_decay": asked.weight_decay}
    if asked.name == "adam":
        return torch.optim.Adam, adam
    if asked.name == "adamw":
        return torch.optim.AdamW, adam
    raise NotImplementedError(asked.name)
