"""What LARS and LAMB have in common: each layer's rate comes from two norms, that of its weights and another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from netfold.train.optimizers.norms import axes, local, settle, whole_norms


class LayerWise(Optimizer, ABC):
    """A step in two turns: where each parameter is to go, then how far, once all norms are known.

    Parameters of one dimension (biases, scales of norms) are no layers: their rate is 1. So is that of a layer with a
    norm of 0. Norms are those of whole parameters: where ranks have parts, one small all_reduce a step for each axis
    that cuts any. It is the same whichever parameters have a gradient: a part without one adds nothing, and stays.
    """

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        self.cut: Mapping[Tensor, Sequence[dist.ProcessGroup]] = {}
        """Among which ranks a parameter was cut: for plain tensors that are parts, since a DTensor says so itself. Also
        for parameters that others step on in this one's place: all ranks of a group must have the same list."""

    def __getstate__(self) -> dict[str, Any]:
        # torch's own leaves out what it does not know, and a copy would take parts for wholes. Groups have no copies.
        return {**super().__getstate__(), "cut": self.cut}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Collective over the ranks that share a cut parameter."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        held = {w: group for group in self.param_groups for w in group["params"]}
        settle(held)
        directions = {w: self._direction(w, group) for w, group in held.items() if w.grad is not None}
        norms = self._norms(held, directions)
        for w, direction in directions.items():
            weight, other = norms.get(w, (0.0, 0.0))
            rate = self._rate(weight, other, held[w]) if weight > 0 and other > 0 else 1.0
            self._move(w, direction, rate, held[w])
        return loss

    def _norms(
        self, held: Mapping[Tensor, Any], directions: Mapping[Tensor, Tensor]
    ) -> dict[Tensor, tuple[float, float]]:
        """Of every layer: its weights', and its direction's."""
        layers = [w for w in dict.fromkeys([*self.cut, *held]) if w.ndim > 1]
        # Of what others step on, nothing.
        weights = [w if w in held else _nothing(w) for w in layers]
        others = [directions[w] if w in directions else _nothing(w) for w in layers]
        cut = [self.cut[w] if w in self.cut else axes(w) for w in layers]
        norms = whole_norms([*weights, *others], [*cut, *cut])
        return dict(zip(layers, zip(norms[: len(layers)], norms[len(layers) :], strict=True), strict=True))

    @abstractmethod
    def _direction(self, w: Tensor, group: dict[str, Any]) -> Tensor:
        """What the other norm is of, as `w` lies here; `w` has a gradient. Called once a step."""

    @abstractmethod
    def _rate(self, weight: float, other: float, group: dict[str, Any]) -> float:
        """Of a layer, from its two norms, which are above 0."""

    @abstractmethod
    def _move(self, w: Tensor, direction: Tensor, rate: float, group: dict[str, Any]) -> None: ...


def _nothing(w: Tensor) -> Tensor:
    return local(w).new_zeros(0)
