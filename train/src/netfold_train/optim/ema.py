"""An exponential moving average of the weights, which evaluations use (Polyak and Juditsky 1992)."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from netfold_train.models.model import Replica
from netfold_train.parallel.shards import exchanged, local


class Ema:
    """average = decay average + (1 - decay) weight, after every step that was applied.

    Each rank averages its own part of each trained parameter: one more copy of them, in f32, and no communication.
    """

    def __init__(self, replica: Replica, decay: float) -> None:
        self._decay = decay
        self.state: dict[Tensor, dict[str, Any]] = {
            each: {} for _, each in replica.named_parameters() if each.requires_grad
        }
        """parameter -> its average, shaped and placed like it; for checkpoints."""
        self.begin()

    def begin(self) -> None:
        """Begin with the present weights, where a checkpoint had no average."""
        for weight, kept in self.state.items():
            kept.setdefault("average", weight.detach().clone())

    @torch.no_grad()
    def step(self) -> None:
        if pairs := self._pairs():  # A stage of a pipeline may have no weights.
            averages, weights = zip(*pairs, strict=True)
            torch._foreach_lerp_(averages, weights, 1.0 - self._decay)

    def in_place(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the parameters have the averages as values."""
        return exchanged(self._pairs())

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """This rank's parts of each average and weight: the same memory."""
        return [(local(kept["average"]), local(weight.detach())) for weight, kept in self.state.items()]
