"""LAMB: Adam with layer-wise rates (You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76
minutes", algorithm 2, with phi(x) = x)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from netfold.train.optimizers.layerwise import LayerWise
from netfold.train.optimizers.norms import local


class LAMB(LayerWise):
    """Adam's direction, as long as each layer's weights.

        m, v   = Adam's means of g and g^2, corrected for their start at 0
        change = m / (sqrt(v) + eps) + weight_decay w
        w      = w - lr |w| / |change| change

    Parameters of one dimension (biases, scales of norms) take `change` as it is, without decay, as is usual; so do,
    with it, those whose weights or change are all 0. State: `exp_avg`, `exp_avg_sq` as the parameter, `step`. While it
    steps, all changes are in memory: one more copy of the weights here.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        if not (lr >= 0 and all(0 <= beta < 1 for beta in betas) and eps >= 0 and weight_decay >= 0):
            raise ValueError(f"LAMB: {lr=}, {betas=}, {eps=}, {weight_decay=}: betas are 0 to below 1")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _direction(self, w: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[w]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(w), torch.zeros_like(w)
        first, second = group["betas"]
        state["step"] += 1
        taken = state["step"].item()
        assert w.grad is not None
        gradient, m, v = local(w.grad), local(state["exp_avg"]), local(state["exp_avg_sq"])
        m.lerp_(gradient, 1 - first)
        v.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        change = torch.sqrt(v / (1 - second**taken))
        change.add_(group["eps"])
        torch.div(m / (1 - first**taken), change, out=change)
        if w.ndim > 1:
            change.add_(local(w), alpha=group["weight_decay"])
        return change

    def _rate(self, weight: float, other: float, group: dict[str, Any]) -> float:
        return weight / other

    def _move(self, w: Tensor, direction: Tensor, rate: float, group: dict[str, Any]) -> None:
        local(w).sub_(direction, alpha=group["lr"] * rate)
