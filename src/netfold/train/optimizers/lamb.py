"""LAMB: Adam with layer-wise rates (You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76
minutes", algorithm 2, with phi(x) = x)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from netfold.train.optimizers.norms import local, settle, whole_norms


class LAMB(Optimizer):
    """Adam's direction, as long as each layer's weights.

        m, v   = Adam's means of g and g^2, corrected for their start at 0
        change = m / (sqrt(v) + eps) + weight_decay w
        w      = w - lr |w| / |change| change

    Parameters of one dimension (biases, scales of norms) take `change` as it is, without decay, as is usual; so do,
    with it, those whose weights or change are all 0. Norms are those of whole parameters: where they are DTensors
    (FSDP2, tensor parallel) by one small all_reduce a step for each axis that cuts them. State: `exp_avg`, `exp_avg_sq`
    as the parameter, `step`. While it steps, all changes are in memory: one more copy of the weights here.
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

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Collective over the ranks that share a cut parameter."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        held = [(w, group) for group in self.param_groups for w in group["params"] if w.grad is not None]
        settle(w for w, _ in held)
        changes = [self._change(w, group) for w, group in held]
        layers = [index for index, (w, _) in enumerate(held) if w.ndim > 1]
        norms = whole_norms([*(held[index][0] for index in layers), *(changes[index] for index in layers)])
        of_layer = dict(zip(layers, zip(norms[: len(layers)], norms[len(layers) :], strict=True), strict=True))
        for index, (w, group) in enumerate(held):
            weight, change = of_layer.get(index, (0.0, 0.0))
            rate = weight / change if weight > 0 and change > 0 else 1.0
            local(w).sub_(local(changes[index]), alpha=group["lr"] * rate)
        return loss

    def _change(self, w: Tensor, group: dict[str, Any]) -> Tensor:
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
        change = torch.empty_like(w)
        into = local(change)
        torch.sqrt(v / (1 - second**taken), out=into)
        into.add_(group["eps"])
        torch.div(m / (1 - first**taken), into, out=into)
        if w.ndim > 1:
            into.add_(local(w), alpha=group["weight_decay"])
        return change
