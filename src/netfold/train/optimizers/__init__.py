"""Optimizers by name. torch's own where it has one; LARS and LAMB, which it has not, are here."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from netfold.train.mesh import Mesh
from netfold.train.optimizers.lamb import LAMB
from netfold.train.optimizers.lars import LARS
from netfold.train.recipe import Optimizer, Recipe
from netfold.train.replica import Replica


def make_optimizer(replica: Replica, recipe: Recipe, mesh: Mesh) -> torch.optim.Optimizer:
    """For this rank's parameters; `lr` is set by the trainer before each step."""
    kind, options = kind_of(recipe.optimizer)
    if kind in (LARS, LAMB):
        for name, parameter in replica.named_parameters():
            if isinstance(replica.as_part(name, parameter.detach()), DTensor) and not isinstance(parameter, DTensor):
                raise ValueError(
                    f"optimizer.name is {recipe.optimizer.name!r}, which needs the norm of each whole parameter, but "
                    f"{name} is cut in a way it does not see; adamw or sgd would do, or parallel.tables = 'replicated'"
                )
    return kind([parameter for _, parameter in replica.named_parameters()], **options)


def kind_of(asked: Optimizer) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class, and its keyword arguments: for who makes it of other parameters."""
    decay = {"lr": asked.lr, "weight_decay": asked.weight_decay}
    if asked.name == "sgd":
        return torch.optim.SGD, {**decay, "momentum": asked.momentum}
    if asked.name == "lars":
        return LARS, {**decay, "momentum": asked.momentum, "trust": asked.trust}
    adam = {**decay, "betas": asked.betas, "eps": asked.eps}
    return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "lamb": LAMB}[asked.name], adam
