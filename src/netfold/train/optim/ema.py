"""An exponential moving average of the weights, which evaluations use (Polyak and Juditsky 1992)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from netfold.train.models.model import Replica
from netfold.train.parallel.shards import local


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
        averages, weights = self._pairs()
        torch._foreach_lerp_(averages, weights, 1.0 - self._decay)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the parameters have the averages as values."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for average, weight in zip(*self._pairs(), strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)

    def _pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        """This rank's parts of the averages and of the weights: the same memory."""
        return (
            [local(kept["average"]) for kept in self.state.values()],
            [local(weight.detach()) for weight in self.state],
        )
