"""LARS: layer-wise adaptive rate scaling (You, Gitman, Ginsburg 2017, "Large Batch Training of Convolutional
Networks", algorithm 1)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from netfold.train.optimizers.layerwise import LayerWise
from netfold.train.optimizers.norms import local


class LARS(LayerWise):
    """SGD with momentum in which each layer's rate is as large as its weights allow.

        rate     = trust |w| / (|g| + weight_decay |w|)
        velocity = momentum velocity + lr rate (g + weight_decay w)
        w        = w - velocity

    Parameters of one dimension (biases, scales of norms) have rate 1 and no decay, as is usual; so do, without the
    latter, those whose weights or gradients are all 0. State: `momentum_buffer`, as the parameter.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.1,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 1e-3,
    ) -> None:
        if not (lr >= 0 and 0 <= momentum <= 1 and weight_decay >= 0 and trust > 0):
            raise ValueError(f"LARS: {lr=}, {momentum=}, {weight_decay=}, {trust=}: momentum is 0..1, trust above 0")
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})

    def _direction(self, w: Tensor, group: dict[str, Any]) -> Tensor:
        assert w.grad is not None
        return w.grad

    def _rate(self, weight: float, other: float, group: dict[str, Any]) -> float:
        rate: float = group["trust"] * weight / (other + group["weight_decay"] * weight)
        return rate

    def _move(self, w: Tensor, direction: Tensor, rate: float, group: dict[str, Any]) -> None:
        state = self.state[w]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(w)
        velocity: Tensor = local(state["momentum_buffer"])
        change = local(direction).add(local(w), alpha=group["weight_decay"] if w.ndim > 1 else 0.0)
        velocity.mul_(group["momentum"]).add_(change, alpha=group["lr"] * rate)
        local(w).sub_(velocity)
