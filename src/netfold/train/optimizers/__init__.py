"""Optimizers by name. torch's own where it has one; LARS and LAMB, which it has not, are here."""

from __future__ import annotations

import torch

from netfold.train.mesh import Mesh
from netfold.train.recipe import Recipe
from netfold.train.replica import Replica


def make_optimizer(replica: Replica, recipe: Recipe, mesh: Mesh) -> torch.optim.Optimizer:
    """For this rank's parameters; `lr` is set by the trainer before each step."""
    asked = recipe.optimizer
    parameters = [parameter for _, parameter in replica.named_parameters()]
    if asked.name == "sgd":
        return torch.optim.SGD(parameters, lr=asked.lr, momentum=asked.momentum, weight_decay=asked.weight_decay)
    if asked.name == "adam":
        return torch.optim.Adam(
            parameters, lr=asked.lr, betas=asked.betas, eps=asked.eps, weight_decay=asked.weight_decay
        )
    if asked.name == "adamw":
        return torch.optim.AdamW(
            parameters, lr=asked.lr, betas=asked.betas, eps=asked.eps, weight_decay=asked.weight_decay
        )
    raise NotImplementedError(asked.name)
