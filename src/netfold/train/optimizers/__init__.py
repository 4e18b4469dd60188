"""Optimizers by name. torch's own where it has one; LARS and LAMB, which it has not, are here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from netfold.train.mesh import Mesh
from netfold.train.optimizers.lamb import LAMB
from netfold.train.optimizers.lars import LARS
from netfold.train.optimizers.layerwise import LayerWise
from netfold.train.optimizers.master import MasterWeights
from netfold.train.optimizers.norms import axes, pieces
from netfold.train.parallel.zero import shared_out, zero_level
from netfold.train.precision import UNROUNDED
from netfold.train.recipe import Optimizer, Recipe
from netfold.train.replica import Replica


def make_optimizer(replica: Replica, recipe: Recipe, mesh: Mesh) -> torch.optim.Optimizer:
    """For this rank's parameters; `lr` is set by the trainer before each step."""
    parts = {held: replica.as_part(name, held.detach()) for name, held in replica.named_parameters()}
    parameters = list(parts)
    kind: Callable[..., torch.optim.Optimizer]
    kind, options = kind_of(recipe.optimizer)
    if kind not in (LARS, LAMB):
        # One call for all parameters: each on a DTensor costs Python some 15 us, and Adam makes ten a parameter.
        options["foreach"] = zero_level(recipe, mesh) >= 2
    if recipe.training.precision != "f32":
        kind = functools.partial(MasterWeights, inner=kind)
    if zero_level(recipe, mesh) == 1:
        sizes = [part.numel() // pieces(part) for part in parts.values()]
        kind = functools.partial(shared_out, kind=kind, mesh=mesh, sizes=sizes)
    made = kind(parameters, **options)
    _tell_cuts(made, parts)
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


def _tell_cuts(optimizer: torch.optim.Optimizer, parts: Mapping[nn.Parameter, Tensor]) -> None:
    """An optimizer that wants norms of whole parameters learns which are parts, and of what."""
    stepping, masters = local_optimizer(optimizer), dict[Tensor, Tensor]()
    if isinstance(stepping, MasterWeights):
        masters = stepping.masters
        stepping = stepping.inner
    if isinstance(stepping, LayerWise):
        cut = {masters.get(parameter, parameter): axes(part) for parameter, part in parts.items()}
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
