"""LARS and LAMB, which torch lacks: the rate of each layer follows from the norms of its weights and of its direction.

LARS: You, Gitman, Ginsburg 2017, "Large Batch Training of Convolutional Networks", algorithm 1.
LAMB: You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", algorithm 2, with
phi(x) = x.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from netfold_train.parallel.shards import local, whole_norms


class LayerWise(Optimizer, ABC):
    """An optimizer whose step computes all directions, then all norms, then moves.

    Parameters of one dimension (biases, scales of norms) have rate 1, and so has a layer with a norm of 0. Norms are
    those of whole parameters: if ranks hold parts, a step makes one small all_reduce for each axis that cuts any
    parameter. The all_reduce does not depend on which parameters have a gradient: a part without one adds 0, and stays.
    """

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Collective over the ranks that hold parts of a parameter. Takes no closure."""
        held = {w: group for group in self.param_groups for w in group["params"]}
        directions = {w: self._direction(w, group) for w, group in held.items() if w.grad is not None}
        layers = [w for w in held if w.ndim > 1]
        # An empty tensor for missing gradients.
        others = [directions[w] if w in directions else local(w).new_zeros(0) for w in layers]
        found = whole_norms([*layers, *others], [*layers, *layers])
        norms = dict(zip(layers, zip(found[: len(layers)], found[len(layers) :], strict=True), strict=True))
        for w, direction in directions.items():
            weight, other = norms.get(w, (0.0, 0.0))
            rate = self._rate(weight, other, held[w]) if weight > 0 and other > 0 else 1.0
            self._move(w, direction, rate, held[w])

    @abstractmethod
    def _direction(self, w: Tensor, group: dict[str, Any]) -> Tensor:
        """This rank's part of the tensor whose norm divides the rate; `w` has a gradient. Called once a step."""

    @abstractmethod
    def _rate(self, weight: float, other: float, group: dict[str, Any]) -> float:
        """The rate of a layer from its two norms, which are above 0."""

    @abstractmethod
    def _move(self, w: Tensor, direction: Tensor, rate: float, group: dict[str, Any]) -> None: ...


class LARS(LayerWise):
    """SGD with momentum and a rate for each layer.

        rate     = trust |w| / (|g| + weight_decay |w|)
        velocity = momentum velocity + lr rate (g + weight_decay w)
        w        = w - velocity

    Parameters of one dimension have rate 1 and no decay, as is usual. A layer whose weights or gradients are all 0 has
    rate 1. State: `momentum_buffer`, shaped like the parameter.
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


class LAMB(LayerWise):
    """Adam's direction, scaled to the norm of each layer's weights.

        m, v   = Adam's means of g and g^2, corrected for their start at 0
        change = m / (sqrt(v) + eps) + weight_decay w
        w      = w - lr |w| / |change| change

    Parameters of one dimension use `change` unscaled and without decay, as is usual. A layer whose weights or change
    are all 0 uses it unscaled, with decay. State: `exp_avg` and `exp_avg_sq`, shaped like the parameter, and `step`. A
    step holds all changes in memory: one more copy of this rank's weights.
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
