"""The contents of a checkpoint: every tensor under a name that does not depend on how the job is split.

    model.<parameter>               optimizer.<parameter>.<key>
    buffer.<buffer>                 update.<key of OptimizerStep.state_dict>

A weight is stored once, in f32, as the optimizer steps on it. A part of a tensor is a DTensor with its place
(`Replica.as_shard`). A rank saves the tensors that it holds, and loads the same.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from netfold.train.model import Replica
from netfold.train.optimizer_step import OptimizerStep

Metadata = Mapping[str, TensorStorageMetadata]
Parameters = Mapping[str, nn.Parameter]


def collect_state(
    replica: Replica, parameters: Parameters, optimizer: torch.optim.Optimizer, update: OptimizerStep, buffers: bool
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """(this rank's tensors, borrowed; the numbers of `update`, which are the same on every rank).

    parameters: the replica's, listed before training began: fully_shard temporarily replaces them by gathered ones,
    which the optimizer does not hold. buffers: also the modules' persistent buffers. Those (running means) differ
    between data-parallel ranks, so one of them saves its own. Raises TypeError if the optimizer keeps anything but
    tensors for a parameter.
    """
    tensors = {f"model.{name}": replica.as_shard(name, each.detach()) for name, each in parameters.items()}
    if buffers:
        tensors |= {f"buffer.{name}": buffer for name, buffer in named_buffers(replica)}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            # None: the optimizer has not made this state yet.
            if value is not None and not isinstance(value, Tensor):
                raise TypeError(f"the optimizer keeps {key} of {name} as {type(value).__name__}; it must be a tensor")
            if value is not None:
                tensors[f"optimizer.{name}.{key}"] = _part(replica, parameter, name, value)
    numbers: dict[str, float] = {}
    for key, value in update.state_dict().items():
        if isinstance(value, Tensor):
            name = key.partition(".")[2]
            tensors[f"update.{key}"] = _part(replica, parameters[name], name, value) if name in parameters else value
        else:
            numbers[key] = value
    return tensors, numbers


class StateToLoad:
    """The tensors that this rank loads from a checkpoint: fill `tensors`, then call `adopt`.

    Parameters and buffers are filled in place. The optimizer's state is allocated by the checkpoint's list, so no
    optimizer step is needed first.
    """

    def __init__(
        self,
        saved: Metadata,
        replica: Replica,
        parameters: Parameters,
        optimizer: torch.optim.Optimizer,
        update: OptimizerStep,
    ) -> None:
        """`parameters`: as for `collect_state`."""
        self._optimizer, self._update = optimizer, update
        self.tensors = {f"model.{name}": replica.as_shard(name, each.detach()) for name, each in parameters.items()}
        self.tensors |= {f"buffer.{name}": buffer for name, buffer in named_buffers(replica)}
        self._states: dict[nn.Parameter, dict[str, Tensor]] = {}
        self._updates: dict[str, Tensor] = {}
        owned = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        of_update = update.wanted(key.removeprefix("update.") for key in saved if key.startswith("update."))
        for key, meta in saved.items():
            kind, _, rest = key.partition(".")
            if kind == "optimizer":
                name, _, of_state = rest.rpartition(".")
                if name in parameters and id(parameters[name]) in owned:
                    value = _empty(replica, name, parameters[name], meta)
                    self._states.setdefault(parameters[name], {})[of_state] = value
                    self.tensors[key] = _part(replica, parameters[name], name, value)
            elif kind == "update" and rest in of_update:
                name = rest.partition(".")[2]
                if name in parameters:
                    self._updates[rest] = _empty(replica, name, parameters[name], meta)
                    self.tensors[key] = _part(replica, parameters[name], name, self._updates[rest])
                elif f"model.{name}" not in saved:  # Otherwise it belongs to a parameter of another rank.
                    self._updates[rest] = self.tensors[key] = torch.empty(meta.size, dtype=meta.properties.dtype)

    def problem(self, saved: Metadata) -> str:
        """Why the checkpoint does not fit this rank's part of the model, or ""."""
        for key, tensor in self.tensors.items():
            if key not in saved:
                return f"it has no {key}"
            if saved[key].size != tensor.shape:
                return f"{key} is {list(saved[key].size)} there and {list(tensor.shape)} here"
        return ""

    def adopt(self, numbers: Mapping[str, float]) -> None:
        """Use the filled tensors as the job's state."""
        self._optimizer.state.clear()
        for parameter, state in self._states.items():
            self._optimizer.state[parameter] = state
        self._update.load_state_dict({**self._updates, **numbers})


def named_buffers(replica: Replica) -> list[tuple[str, Tensor]]:
    """The persistent buffers of the modules."""
    found: list[tuple[str, Tensor]] = []
    for module in replica.modules:
        kept = module.state_dict()
        found += [(name, buffer) for name, buffer in module.named_buffers() if name in kept]
    return found


def _part(replica: Replica, parameter: nn.Parameter, name: str, value: Tensor) -> Tensor:
    return replica.as_shard(name, value) if value.shape == parameter.shape else value


def _empty(replica: Replica, name: str, parameter: nn.Parameter, meta: TensorStorageMetadata) -> Tensor:
    """A tensor of this rank's shape if the saved one has the parameter's shape, else of the saved shape (a count)."""
    if meta.size == replica.as_shard(name, parameter.detach()).shape:
        return torch.zeros_like(parameter, dtype=meta.properties.dtype, requires_grad=False)
    return torch.empty(meta.size, dtype=meta.properties.dtype)
