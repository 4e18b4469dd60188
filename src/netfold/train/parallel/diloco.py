"""Low-communication data parallel: ranks train independently, and use their mean change every k steps as a gradient.

DiLoCo: Douillard et al. 2023, algorithm 1. With lr 1 and momentum 0 it is local SGD (Stich 2019).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from netfold.train.mesh import Axis, all_reduce_together, in_runs
from netfold.train.model import Replica
from netfold.train.optimizers.norms import local
from netfold.train.recipe import DiLoCo

# The largest message: few calls, without a second copy of the whole model.
BUFFER_BYTES = 64 << 20
_INNER = re.compile(r"inner(\d+)_(\w+)\.(.+)")


class DiLoCoRounds:
    """Make the data-parallel ranks' weights equal at the end of every round of `every` steps.

    A round's gradient is its initial weights minus the mean of the ranks' weights. SGD with Nesterov momentum then
    computes the next round's initial weights. Each rank keeps its own optimizer state; floating-point buffers (batch
    norm's) are averaged. Holds two copies of this rank's weights: the round's initial weights, and the momentum.
    """

    def __init__(self, replica: Replica, optimizer: torch.optim.Optimizer, asked: DiLoCo, data: Axis) -> None:
        """Broadcast the weights of the first data-parallel rank. Collective over the data axis."""
        self._replica, self._optimizer, self._asked, self._data = replica, optimizer, asked, data
        self._weights = {name: local(held.detach()) for name, held in replica.named_parameters()}
        for weight in self._weights.values():
            dist.broadcast(weight, group=data.group, group_src=0)
        self._starts = {name: weight.clone() for name, weight in self._weights.items()}
        self._outer = torch.optim.SGD(
            list(self._starts.values()), asked.lr, asked.momentum, nesterov=asked.momentum > 0
        )
        self.between = True
        """No round has begun: data-parallel ranks hold the same weights."""

    def end_step(self, number: int) -> None:
        """End step `number` of the job (from 1), taken or left out; end the round too if it is complete.

        Collective over the data axis at the end of a round.
        """
        self.between = False
        if number % self._asked.every == 0:
            self.settle()

    @torch.no_grad()
    def settle(self) -> None:
        """End an unfinished round, however short. Collective over the data axis."""
        if self.between:
            return
        weights = dict(zip(self._starts.values(), self._weights.values(), strict=True))
        # One run at a time, so that there are few gradients at a time. SGD leaves out tensors without a gradient.
        for starts in in_runs(list(weights), BUFFER_BYTES):
            gradients = [start - weights[start] for start in starts]
            all_reduce_together(gradients, self._data.group, divisor=self._data.size)
            for start, gradient in zip(starts, gradients, strict=True):
                start.grad = gradient
            self._outer.step()
            self._outer.zero_grad()
        for start, weight in weights.items():
            weight.copy_(start)
        for module in self._replica.modules:
            for held in module.buffers():
                if held.is_floating_point():
                    dist.all_reduce(held, group=self._data.group)
                    held /= self._data.size
        self.between = True

    def state_dict(self) -> dict[str, Tensor]:
        """The state between rounds, for a checkpoint; tensors are borrowed.

        "outer_start.<name>", "outer_momentum.<name>": initial weights and momentum of this rank's parameters.
        "inner<data rank>_<key>.<name>": the state of this rank's own optimizer.
        """
        state: dict[str, Tensor] = {}
        for name, parameter in self._replica.named_parameters():
            start = state[f"outer_start.{name}"] = self._starts[name]
            momentum = self._outer.state.get(start, {}).get("momentum_buffer")
            if momentum is not None:
                state[f"outer_momentum.{name}"] = momentum
            for what, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    state[f"inner{self._data.rank}_{what}.{name}"] = value
        return state

    def wanted(self, saved: Iterable[str]) -> set[str]:
        """Select this rank's names from a checkpoint: of inner states only its own.

        With more data-parallel ranks than saved inner states, the further ranks reuse them in order.
        """
        names = set(saved)
        inner = {name: int(found[1]) for name in names if (found := _INNER.match(name))}
        own = self._data.rank % (1 + max(inner.values(), default=0))
        return {name for name in names if inner.get(name, own) == own}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint whose weights are loaded; takes over the tensors of the optimizers' states.

        After a checkpoint without rounds, a round begins with the loaded weights and a momentum of 0.
        """
        self.between = True
        self._outer.state.clear()
        for name, start in self._starts.items():
            start.copy_(local(state.get(f"outer_start.{name}", self._weights[name])))
            if f"outer_momentum.{name}" in state:
                self._outer.state[start]["momentum_buffer"] = local(state[f"outer_momentum.{name}"])
        parameters = dict(self._replica.named_parameters())
        for key in self.wanted(state):
            found = _INNER.match(key)
            if found is not None and found[3] in parameters:
                self._optimizer.state[parameters[found[3]]][found[2]] = state[key]


def is_diloco_key(name: str) -> bool:
    """Whether `DiLoCoRounds.state_dict` gives this name to a checkpoint."""
    return name.startswith("outer_") or _INNER.match(name) is not None
