"""Low-communication data parallel: ranks train apart, and every so many steps take what they learnt as a gradient
(DiLoCo: Douillard et al. 2023, algorithm 1; with lr 1 and momentum 0 it is local SGD: Stich 2019)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from netfold.train.mesh import Axis
from netfold.train.optimizers.norms import local
from netfold.train.recipe import DiLoCo
from netfold.train.replica import Replica

# What travels together: few large calls, and not one more copy of the whole model.
BUFFER_BYTES = 64 << 20


class DiLoCoRounds:
    """At the end of every round of `every` steps makes the data-parallel ranks' weights the same again.

    The gradient of a round is where it began less the mean of where the ranks are; SGD with Nesterov's momentum takes
    it to where the next round begins. Optimizers' states stay each rank's own; buffers (batch norm's) become their
    mean. Holds two copies of the weights that are here: where the round began, and the momentum.
    """

    def __init__(self, replica: Replica, optimizer: torch.optim.Optimizer, asked: DiLoCo, data: Axis) -> None:
        """Collective over the data axis: all begin with the weights of its first rank."""
        self._replica, self._optimizer, self._asked, self._data = replica, optimizer, asked, data
        self._buffers = [_Buffer(part) for part in _packed(dict(replica.named_parameters()))]
        for buffer in self._buffers:
            dist.broadcast(buffer.start, group=data.group, group_src=0)
            buffer.put()
        self.between = True
        """No round is under way: data-parallel ranks hold the same weights."""

    def moved(self) -> None:
        """This rank's optimizer has taken a step."""
        self.between = False

    def end_step(self, number: int) -> None:
        """Step `number` of the job, from 1, is over, taken or left out: the round may be too. Collective over the data
        axis at the end of a round, whichever of its ranks have moved."""
        self.between = False
        if number % self._asked.every == 0:
            self.settle()

    @torch.no_grad()
    def settle(self) -> None:
        """End a round that is under way, however short. Collective over the data axis."""
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
        """For a checkpoint between rounds; tensors are borrowed.

        "outer_start.<name>", "outer_momentum.<name>": where the next round begins, and the momentum, as the parameters
        that are here. "inner<data rank>_<what>.<name>": the state of this rank's own optimizer, which no other has.
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
        """Of the names in a checkpoint, this rank's: of inner states its own alone. Where there are fewer of these than
        data-parallel ranks, ranks beyond take the state of others, in turn."""
        names = set(saved)
        inner = {name: int(found[1]) for name in names if (found := _INNER.match(name))}
        ranks = 1 + max(inner.values(), default=0)
        return {name for name in names if inner.get(name, self._data.rank % ranks) == self._data.rank % ranks}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint whose weights are loaded; tensors of the optimizer's state are taken over. One
        without rounds leaves the weights where the next begins, and no momentum."""
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
    """Whether a name in a checkpoint is one that `Rounds.state_dict` gives."""
    return name.startswith("outer_") or _INNER.match(name) is not None


@dataclass
class _Buffer:
    """Some parameters in one line."""

    parameters: Mapping[str, nn.Parameter]

    def __post_init__(self) -> None:
        self.start = self.now()
        self.momentum = torch.zeros_like(self.start)

    @torch.no_grad()
    def now(self) -> Tensor:
        return torch.cat([local(parameter).flatten() for parameter in self.parameters.values()])

    @torch.no_grad()
    def put(self) -> None:
        """Make the parameters what `start` is."""
        for name, part in self.views(self.start):
            local(self.parameters[name]).copy_(part)

    def views(self, line: Tensor) -> list[tuple[str, Tensor]]:
        """The parts of a line, with their parameters' names and local shapes."""
        shapes = {name: local(parameter).shape for name, parameter in self.parameters.items()}
        parts = torch.split(line, [shape.numel() for shape in shapes.values()])
        return [(name, part.view(shape)) for part, (name, shape) in zip(parts, shapes.items(), strict=True)]


def _packed(parameters: Mapping[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
    """In runs of one dtype and at most BUFFER_BYTES; a parameter that is larger is one of its own."""
    runs: list[dict[str, nn.Parameter]] = []
    room, kind = 0, None
    for name, parameter in parameters.items():
        size = local(parameter).nbytes
        if not runs or size > room or parameter.dtype != kind:
            runs.append({})
            room, kind = BUFFER_BYTES, parameter.dtype
        runs[-1][name] = parameter
        room -= size
    return runs
