"""The contents of a checkpoint: every tensor under a name that does not depend on how the job is split.

    model.<parameter>               optimizer.<parameter>.<key>
    buffer.<buffer>                 update.<key of OptimizerStep.state_dict>

A weight is stored once, in f32, as the optimizer steps on it. A part of a tensor is a DTensor with its place
(`Replica.as_shard`). A rank saves the tensors that it holds, and loads the same.

torch's get_state_dict does not fit: it knows neither the stages of a pipeline nor `OptimizerStep`.
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
    tensors = _model_and_optimizer(replica, parameters, optimizer, buffers)
    numbers: dict[str, float] = {}
    for key, value in update.state_dict().items():
        if isinstance(value, Tensor):
            tensors[f"update.{key}"] = _part(replica, parameters, key.partition(".")[2], value)
        else:
            numbers[key] = value
    return tensors, numbers


def allocate_state(
    saved: Metadata, replica: Replica, parameters: Parameters, optimizer: torch.optim.Optimizer, update: OptimizerStep
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(the tensors that this rank loads from a checkpoint, those of them that `update.load_state_dict` takes).

    Parameters, buffers and the optimizer's state are loaded in place. The checkpoint's list says which state the
    optimizer has, so no optimizer step is needed first.
    """
    optimizer.state.clear()
    of_update = update.wanted(key.removeprefix("update.") for key in saved if key.startswith("update."))
    updates: dict[str, Tensor] = {}
    for key, meta in saved.items():
        kind, _, rest = key.partition(".")
        if kind == "optimizer":
            name, _, of_state = rest.rpartition(".")
            if name in parameters:
                optimizer.state[parameters[name]][of_state] = _empty(replica, parameters, name, meta)
        elif kind == "update" and rest in of_update:
            name = rest.partition(".")[2]
            # A name that the model has and this rank does not is that of another rank's parameter.
            if name in parameters or f"model.{name}" not in saved:
                updates[rest] = _empty(replica, parameters, name, meta)
    tensors = _model_and_optimizer(replica, parameters, optimizer, buffers=True)
    tensors |= {
        f"update.{key}": _part(replica, parameters, key.partition(".")[2], value) for key, value in updates.items()
    }
    return tensors, updates


def _model_and_optimizer(
    replica: Replica, parameters: Parameters, optimizer: torch.optim.Optimizer, buffers: bool
) -> dict[str, Tensor]:
    """The tensors whose names begin with "model.", "buffer." and "optimizer."."""
    tensors = {f"model.{name}": replica.as_shard(name, each.detach()) for name, each in parameters.items()}
    for module in replica.modules if buffers else ():
        persistent = module.state_dict()
        tensors |= {f"buffer.{name}": each for name, each in module.named_buffers() if name in persistent}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            # None: the optimizer has not made this state yet.
            if value is not None and not isinstance(value, Tensor):
                raise TypeError(f"the optimizer keeps {key} of {name} as {type(value).__name__}; it must be a tensor")
            if value is not None:
                tensors[f"optimizer.{name}.{key}"] = _part(replica, parameters, name, value)
    return tensors


def _part(replica: Replica, parameters: Parameters, name: str, value: Tensor) -> Tensor:
    """`value` as a part of the whole if it has the shape of parameter `name`; else (a count) as it is."""
    return replica.as_shard(name, value) if name in parameters and value.shape == parameters[name].shape else value


def _empty(replica: Replica, parameters: Parameters, name: str, meta: TensorStorageMetadata) -> Tensor:
    """A tensor of this rank's shape if the saved one has the shape of parameter `name`, else of the saved shape."""
    if name in parameters and meta.size == replica.as_shard(name, parameters[name].detach()).shape:
        return torch.zeros_like(parameters[name], dtype=meta.properties.dtype, requires_grad=False)
    return torch.empty(meta.size, dtype=meta.properties.dtype)
