"""Low-communication data parallel: ranks train independently, and use their mean change every k steps as a gradient.

DiLoCo: Douillard et al. 2023, algorithm 1. With lr 1 and momentum 0 it is local SGD (Stich 2019).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from netfold.train.mesh import Axis
from netfold.train.model import Replica
from netfold.train.optimizers.norms import local
from netfold.train.recipe import DiLoCo

# The largest message: few calls, without a second copy of the whole model.
BUFFER_BYTES = 64 << 20


class DiLoCoRounds:
    """Make the data-parallel ranks' weights equal at the end of every round of `every` steps.

    A round's gradient is its initial weights minus the mean of the ranks' weights. SGD with Nesterov momentum then
    computes the next round's initial weights. Each rank keeps its own optimizer state; floating-point buffers (batch
    norm's) are averaged. Holds two copies of this rank's weights: the round's initial weights, and the momentum.
    """

    def __init__(self, replica: Replica, optimizer: torch.optim.Optimizer, asked: DiLoCo, data: Axis) -> None:
        """Broadcast the weights of the first data-parallel rank. Collective over the data axis."""
        self._replica, self._optimizer, self._asked, self._data = replica, optimizer, asked, data
        self._buffers = [_Buffer(part) for part in _packed(dict(replica.named_parameters()))]
        for buffer in self._buffers:
            dist.broadcast(buffer.start, group=data.group, group_src=0)
            buffer.put()
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
        # One buffer at a time, so that there is one gradient at a time.
        for buffer in self._buffers:
            gradient = buffer.start - buffer.now()
            dist.all_reduce(gradient, group=self._data.group)
            gradient /= self._data.size
            buffer.momentum.mul_(self._asked.momentum).add_(gradient)
            buffer.start.sub_(gradient.add_(buffer.momentum, alpha=self._asked.momentum), alpha=self._asked.lr)
            buffer.put()
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
        for buffer in self._buffers:
            state |= {f"outer_start.{name}": part for name, part in buffer.views(buffer.start)}
            state |= {f"outer_momentum.{name}": part for name, part in buffer.views(buffer.momentum)}
        for name, parameter in self._replica.named_parameters():
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
        ranks = 1 + max(inner.values(), default=0)
        return {name for name in names if inner.get(name, self._data.rank % ranks) == self._data.rank % ranks}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint whose weights are loaded; takes over the tensors of the optimizer's state.

        After a checkpoint without rounds, a round begins with the loaded weights and a momentum of 0.
        """
        self.between = True
        wanted = self.wanted(state)
        for buffer in self._buffers:
            buffer.start, buffer.momentum = buffer.now(), torch.zeros_like(buffer.momentum)
            for kind, line in ("outer_start", buffer.start), ("outer_momentum", buffer.momentum):
                for name, part in buffer.views(line):
                    if f"{kind}.{name}" in wanted:
                        part.copy_(local(state[f"{kind}.{name}"]))
        parameters = dict(self._replica.named_parameters())
        for key in wanted:
            found = _INNER.match(key)
            if found is not None and found[3] in parameters:
                self._optimizer.state[parameters[found[3]]][found[2]] = state[key]


_INNER = re.compile(r"inner(\d+)_(\w+)\.(.+)")


def is_diloco_key(name: str) -> bool:
    """Whether `DiLoCoRounds.state_dict` gives this name to a checkpoint."""
    return name.startswith("outer_") or _INNER.match(name) is not None


@dataclass
class _Buffer:
    """Some parameters as one flat tensor."""

    parameters: Mapping[str, nn.Parameter]

    def __post_init__(self) -> None:
        self.start = self.now()
        self.momentum = torch.zeros_like(self.start)

    @torch.no_grad()
    def now(self) -> Tensor:
        return torch.cat([local(parameter).flatten() for parameter in self.parameters.values()])

    @torch.no_grad()
    def put(self) -> None:
        """Copy `start` into the parameters."""
        for name, part in self.views(self.start):
            local(self.parameters[name]).copy_(part)

    def views(self, line: Tensor) -> list[tuple[str, Tensor]]:
        """(parameter's name, its part of the flat tensor in its local shape)."""
        shapes = {name: local(parameter).shape for name, parameter in self.parameters.items()}
        parts = torch.split(line, [shape.numel() for shape in shapes.values()])
        return [(name, part.view(shape)) for part, (name, shape) in zip(parts, shapes.items(), strict=True)]


def _packed(parameters: Mapping[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
    """Runs of one dtype and at most BUFFER_BYTES; a larger parameter is a run of its own."""
    runs: list[dict[str, nn.Parameter]] = []
    left, dtype = 0, None
    for name, parameter in parameters.items():
        size = local(parameter).nbytes
        if not runs or size > left or parameter.dtype != dtype:
            runs.append({})
            left, dtype = BUFFER_BYTES, parameter.dtype
        runs[-1][name] = parameter
        left -= size
    return runs
