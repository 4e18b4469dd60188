"""LARS: layer-wise adaptive rate scaling (You, Gitman, Ginsburg 2017, "Large Batch Training of Convolutional
Networks", algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from netfold.train.optimizers.norms import local, settle, whole_norms


class LARS(Optimizer):
    """SGD with momentum in which each layer's rate is as large as its weights allow.

        rate     = trust |w| / (|g| + weight_decay |w|)
        velocity = momentum velocity + lr rate (g + weight_decay w)
        w        = w - velocity

    Parameters of one dimension (biases, scales of norms) have rate 1 and no decay, as is usual; so do, without the
    latter, those whose weights or gradients are all 0. Norms are those of whole parameters: where they are DTensors
    (FSDP2, tensor parallel) by one small all_reduce a step for each axis that cuts them. State: `momentum_buffer`, as
    the parameter.
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

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Collective over the ranks that share a cut parameter."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        held = [(w, group) for group in self.param_groups for w in group["params"] if w.grad is not None]
        settle(w for w, _ in held)
        layers = [w for w, _ in held if w.ndim > 1]
        norms = whole_norms([*layers, *(w.grad for w in layers)])
        of_layer = dict(zip(layers, zip(norms[: len(layers)], norms[len(layers) :], strict=True), strict=True))
        for w, group in held:
            rate, decay = 1.0, 0.0
            if w in of_layer:
                weight, gradient = of_layer[w]
                decay = group["weight_decay"]
                if weight > 0 and gradient > 0:
                    rate = group["trust"] * weight / (gradient + decay * weight)
            state = self.state[w]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(w)
            velocity: Tensor = local(state["momentum_buffer"])
            change = local(w.grad).add(local(w), alpha=decay)
            velocity.mul_(group["momentum"]).add_(change, alpha=group["lr"] * rate)
            local(w).sub_(velocity)
        return loss
