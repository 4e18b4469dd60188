"""Low-communication data parallel: ranks train independently, and use their mean change every k steps as a gradient.

DiLoCo: Douillard et al. 2023, algorithm 1. With lr 1 and momentum 0 it is local SGD (Stich 2019).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from netfold.train.models.model import Replica
from netfold.train.parallel.mesh import Axis, all_reduce_together, in_runs
from netfold.train.parallel.shards import local
from netfold.train.recipe import DiLoCo

# The largest message: few calls, without a second copy of the whole model.
BUFFER_BYTES = 64 << 20


class DiLoCoRounds:
    """Make the data-parallel ranks' weights equal at the end of every round of `every` steps.

    A round's gradient is its initial weights minus the mean of the ranks' weights. SGD with Nesterov momentum then
    computes the next round's initial weights. Each rank keeps its own optimizer state; floating-point buffers (batch
    norm's) are averaged. Holds two copies of this rank's weights: the round's initial weights, and the momentum.
    """

    def __init__(self, replica: Replica, asked: DiLoCo, data: Axis) -> None:
        """Broadcast the weights of the first data-parallel rank. Collective over the data axis."""
        self._modules, self._every, self._data = replica.modules, asked.every, data
        parameters = [held for _, held in replica.named_parameters()]
        weights = [held.detach() for held in parameters]
        for weight in weights:
            dist.broadcast(local(weight), group=data.group, group_src=0)
        # The round's initial weights -> the weights.
        self._weights = {weight.clone(): weight for weight in weights}
        self._outer = torch.optim.SGD(list(self._weights), asked.lr, asked.momentum, nesterov=asked.momentum > 0)
        self.state: dict[Tensor, dict[str, Any]] = {
            held: self._outer.state[start] for held, start in zip(parameters, self._weights, strict=True)
        }
        """Of the outer optimizer, for each parameter. Between rounds the weights are the round's initial weights."""
        self.between = True
        """No round has begun: data-parallel ranks hold the same weights."""

    def end_step(self, number: int) -> None:
        """End step `number` of the job (from 1), taken or left out; end the round too if it is complete.

        Collective over the data axis at the end of a round.
        """
        self.between = False
        if number % self._every == 0:
            self.settle()

    @torch.no_grad()
    def settle(self) -> None:
        """End an unfinished round, however short. Collective over the data axis."""
        if self.between:
            return
        # One run at a time, so that there are few gradients at a time. SGD leaves out tensors without a gradient.
        for starts in in_runs(list(self._weights), BUFFER_BYTES):
            gradients = [start - self._weights[start] for start in starts]
            parts = [local(gradient) for gradient in gradients]
            all_reduce_together(parts, self._data.group, divisor=self._data.size)
            for start, gradient in zip(starts, gradients, strict=True):
                start.grad = gradient
            self._outer.step()
            self._outer.zero_grad()
        for start, weight in self._weights.items():
            weight.copy_(start)
        for module in self._modules:
            for held in module.buffers():
                if held.is_floating_point():
                    dist.all_reduce(held, group=self._data.group)
                    held /= self._data.size
        self.between = True

    @torch.no_grad()
    def begin(self) -> None:
        """Begin a round with the present weights, after they and `state` were loaded from a checkpoint."""
        for start, weight in self._weights.items():
            start.copy_(weight)
        self.between = True
