"""The contents of a checkpoint: every tensor under a name that does not depend on how the job is split.

    model.<parameter>      <kind>.<parameter>.<key>, the kinds of `OptimizerStep.states`: "optimizer", ...
    buffer.<buffer>

A weight is stored once, in f32, as the optimizer steps on it. A part of a tensor is a DTensor with its place. A rank
saves the tensors that it holds, and loads the same.

torch's get_state_dict does not fit: it knows neither the stages of a pipeline nor `OptimizerStep`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from netfold.train.models.model import Replica
from netfold.train.optim.step import States

Metadata = Mapping[str, TensorStorageMetadata]
Parameters = Mapping[str, nn.Parameter]


def collect_state(replica: Replica, parameters: Parameters, states: States, buffers: bool) -> dict[str, Tensor]:
    """This rank's tensors, borrowed.

    parameters: the replica's, listed before training began: fully_shard temporarily replaces them by gathered ones,
    which the optimizer does not hold. buffers: also the modules' persistent buffers. Those (running means) differ
    between data-parallel ranks, so one of them saves its own. Raises TypeError if the optimizer keeps anything but
    tensors for a parameter.
    """
    tensors = {f"model.{name}": each.detach() for name, each in parameters.items()}
    for module in replica.modules if buffers else ():
        persistent = module.state_dict()
        tensors |= {f"buffer.{name}": each for name, each in module.named_buffers() if name in persistent}
    for kind, state in states.items():
        for name, parameter in parameters.items():
            for key, value in state.get(parameter, {}).items():
                # None: the optimizer has not made this state yet.
                if value is None:
                    continue
                if not isinstance(value, Tensor):
                    raise TypeError(
                        f"the optimizer keeps {key} of {name} as {type(value).__name__}; it must be a tensor"
                    )
                tensors[f"{kind}.{name}.{key}"] = value
    return tensors


def allocate_state(saved: Metadata, replica: Replica, parameters: Parameters, states: States) -> dict[str, Tensor]:
    """The tensors that this rank loads in place from a checkpoint.

    The checkpoint's list says which state the optimizer has, so no optimizer step is needed first.
    """
    for state in states.values():
        for of_parameter in state.values():
            of_parameter.clear()
    for key, meta in saved.items():
        kind, _, rest = key.partition(".")
        name, _, of_state = rest.rpartition(".")
        if kind in states and name in parameters:
            states[kind][parameters[name]][of_state] = _empty(parameters[name], meta)
    return collect_state(replica, parameters, states, buffers=True)


def _empty(parameter: Tensor, meta: TensorStorageMetadata) -> Tensor:
    """A tensor of this rank's shape if the saved one has the shape of the whole parameter, else of the saved shape."""
    if meta.size == parameter.shape:
        return torch.zeros_like(parameter, dtype=meta.properties.dtype, requires_grad=False)
    return torch.empty(meta.size, dtype=meta.properties.dtype)
