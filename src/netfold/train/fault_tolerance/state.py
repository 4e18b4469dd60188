"""What a checkpoint holds of a job: every tensor under a name that does not depend on how the job is split.

    model.<parameter>               optimizer.<parameter>.<key>
    buffer.<buffer>                 update.<what Update.state_dict says>

A weight is there once, as the optimizer steps on it: in f32, whatever it is computed with. A part of a tensor is a
DTensor that says which (`Replica.as_shard`); a rank gives what it holds, and asks for the same.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from netfold.train.optimizer_step import OptimizerStep
from netfold.train.optimizers import local_optimizer
from netfold.train.replica import Replica

Metadata = Mapping[str, TensorStorageMetadata]
Parameters = Mapping[str, nn.Parameter]


def collect_state(
    replica: Replica, parameters: Parameters, optimizer: torch.optim.Optimizer, update: OptimizerStep, buffers: bool
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """What this rank holds: tensors, borrowed, and the numbers of the update, which are the same on every rank.

    `parameters`: the replica's, listed before training began: fully_shard puts gathered ones in their places for a
    while, and these are not what the optimizer holds. `buffers`: also the modules' persistent buffers; they differ
    among data-parallel ranks (running means), so one gives them. Raises TypeError for an optimizer that keeps anything
    but tensors for a parameter.
    """
    local = local_optimizer(optimizer)
    tensors = {f"model.{name}": replica.as_shard(name, each.detach()) for name, each in parameters.items()}
    if buffers:
        tensors |= {f"buffer.{name}": buffer for name, buffer in named_buffers(replica)}
    for name, parameter in parameters.items():
        for key, value in local.state.get(parameter, {}).items():
            # None stands for what the optimizer has not made yet.
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
    """What this rank asks of a checkpoint: `tensors`, to be filled, then `adopt`.

    Parameters and buffers are filled in place, in whatever they are kept in. The optimizer's state is made
    here, from the checkpoint's own list: so no step has to be taken to have some, and a rank that shares it out asks
    for what it owns alone.
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
        self._optimizer, self._update = local_optimizer(optimizer), update
        self.tensors = {f"model.{name}": replica.as_shard(name, each.detach()) for name, each in parameters.items()}
        self.tensors |= {f"buffer.{name}": buffer for name, buffer in named_buffers(replica)}
        self._states: dict[nn.Parameter, dict[str, Tensor]] = {}
        self._updates: dict[str, Tensor] = {}
        owned = _owned(self._optimizer)
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
                elif f"model.{name}" not in saved:  # else it goes with a parameter that another rank holds
                    self._updates[rest] = self.tensors[key] = torch.empty(meta.size, dtype=meta.properties.dtype)

    def problem(self, saved: Metadata) -> str:
        """Why the checkpoint is not of this model, as far as this rank holds it; "" where it is."""
        for key, tensor in self.tensors.items():
            if key not in saved:
                return f"it has no {key}"
            if saved[key].size != tensor.shape:
                return f"{key} is {list(saved[key].size)} there and {list(tensor.shape)} here"
        return ""

    def adopt(self, numbers: Mapping[str, float]) -> None:
        """Make the filled tensors the job's own."""
        self._optimizer.state.clear()
        for parameter, state in self._states.items():
            self._optimizer.state[parameter] = state
        self._update.load_state_dict({**self._updates, **numbers})


def named_buffers(replica: Replica) -> list[tuple[str, Tensor]]:
    """The persistent ones."""
    found: list[tuple[str, Tensor]] = []
    for module in replica.modules:
        kept = module.state_dict()
        found += [(name, buffer) for name, buffer in module.named_buffers() if name in kept]
    return found


def _owned(optimizer: torch.optim.Optimizer) -> set[int]:
    """The ids of the parameters that this rank steps on."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _part(replica: Replica, parameter: nn.Parameter, name: str, value: Tensor) -> Tensor:
    return replica.as_shard(name, value) if value.shape == parameter.shape else value


def _empty(replica: Replica, name: str, parameter: nn.Parameter, meta: TensorStorageMetadata) -> Tensor:
    """Of this rank's shape where it goes with the parameter's elements, else of the saved one (a count of steps)."""
    if meta.size == replica.as_shard(name, parameter.detach()).shape:
        return torch.zeros_like(parameter, dtype=meta.properties.dtype, requires_grad=False)
    return torch.empty(meta.size, dtype=meta.properties.dtype)
