"""Make a recipe's optimizer and learning rate. The optimizers are torch's, and LARS and LAMB (`layerwise`)."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase

from netfold_train.models.model import Replica
from netfold_train.optim.layerwise import LAMB, LARS
from netfold_train.recipe import Optimizer, Recipe, Schedule

_UNDECAYED = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm, _NormBase)


def make_optimizer(replica: Replica, recipe: Recipe, undecayed: Collection[str] = ()) -> torch.optim.Optimizer:
    """Make the optimizer of this rank's parameters; the trainer sets `lr` before each step.

    undecayed: names of parameters without weight decay (`undecayed` of the whole model), unless `optimizer.decay` is
    "all".
    """
    kind, options = kind_of(recipe.optimizer)
    return kind(_groups(replica, recipe.optimizer, undecayed), **options)


def kind_of(asked: Optimizer) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The optimizer's class and its keyword arguments."""
    decay = {"lr": asked.lr, "weight_decay": asked.weight_decay}
    if asked.name == "sgd":
        return torch.optim.SGD, {**decay, "momentum": asked.momentum}
    if asked.name == "lars":
        return LARS, {**decay, "momentum": asked.momentum, "trust": asked.trust}
    adam = {**decay, "betas": asked.betas, "eps": asked.eps}
    return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "lamb": LAMB}[asked.name], adam


def undecayed(module: nn.Module) -> frozenset[str]:
    """Names of parameters without weight decay: of norms and embeddings, and those with fewer than two dimensions.

    As in Megatron-LM and BERT. module: the whole model, not cut. A parameter that several layers share is undecayed if
    one of them is such a layer; all its names are returned. A bare `nn.Parameter` of two dimensions or more is a
    weight.
    """
    found = {
        id(parameter)
        for part in module.modules()
        for parameter in part.parameters(recurse=False)
        if parameter.ndim < 2 or isinstance(part, _UNDECAYED)
    }
    named = module.named_parameters(remove_duplicate=False)
    return frozenset(name for name, parameter in named if id(parameter) in found)


def learning_rate(lr: float, schedule: Schedule, step: int, steps: int, batch: int) -> float:
    """The rate at `step` (from 0) of `steps`, for a global batch: a linear rise, then a fall to `final` by the shape.

    A function of the step, so a checkpoint holds no state of it.
    """
    if schedule.reference_batch is not None:
        lr *= batch / schedule.reference_batch
    if step < schedule.warmup:
        return lr * (step + 1) / schedule.warmup
    if schedule.shape == "constant":
        return lr
    begin = schedule.warmup
    if schedule.shape == "wsd":
        begin = max(begin, steps - round(schedule.decay * steps))
    done = max(0, step - begin) / max(1, steps - begin)
    left = 0.5 * (1.0 + math.cos(math.pi * done)) if schedule.shape == "cosine" else 1.0 - done
    return lr * (schedule.final + (1.0 - schedule.final) * left)


def _groups(replica: Replica, asked: Optimizer, undecayed: Collection[str]) -> list[dict[str, Any]]:
    """This rank's trained parameters, by whether they have weight decay, and whether they are DTensors."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, held in replica.named_parameters():
        if held.requires_grad:
            decayed = asked.decay == "all" or name not in undecayed
            groups.setdefault((decayed, isinstance(held, DTensor)), []).append(held)
    return [
        {
            "params": held,
            "weight_decay": asked.weight_decay if decayed else 0.0,
            # One call for all parameters, where torch has it: an operation on a DTensor costs about 15 us of Python,
            # and Adam makes ten per parameter. torch takes no mixture of DTensors and other tensors.
            **({"fused": True} if asked.name in ("adam", "adamw") else {"foreach": cut} if asked.name == "sgd" else {}),
        }
        for (decayed, cut), held in groups.items()
    ]
