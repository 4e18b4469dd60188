"""The contents of a checkpoint: every tensor under a name that does not depend on how the job is split.

    model.<parameter>      <kind>.<parameter>.<key>, the kinds of `OptimizerStep.states`: "optimizer", ...
    buffer.<buffer>

A weight is stored once, in f32, as the optimizer steps on it. A part of a tensor is a DTensor with its place. A rank
saves the tensors that it holds, and loads the same in place; torch.distributed.checkpoint moves parts between any two
splits.

torch's get_state_dict (2.13) does not serve here. get_optimizer_state_dict takes one module, but a pipeline's rank has
several stages and one optimizer. It steps an optimizer without state: Adam would count a step that was not made, and
LARS would wait for other ranks. It saves learning rates and decay too, which follow from the recipe.
get_model_state_dict gives a shared weight twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from netfold.units import first_few
from netfold_train.models.model import Replica
from netfold_train.optim.step import States
from netfold_train.parallel.mesh import gather
from netfold_train.parallel.shards import local

Metadata = Mapping[str, TensorStorageMetadata]
Parameters = Mapping[str, nn.Parameter]
T = TypeVar("T")
# Of each kind of difference in an error.
_NAMES_SHOWN = 8


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written or read."""


def model_tensors(modules: Iterable[nn.Module], parameters: Parameters) -> dict[str, Tensor]:
    """The parameters and the modules' persistent buffers, borrowed."""
    tensors = {f"model.{name}": each.detach() for name, each in parameters.items()}
    for module in modules:
        persistent = module.state_dict()
        tensors |= {f"buffer.{name}": each for name, each in module.named_buffers() if name in persistent}
    return tensors


def collect_state(replica: Replica, parameters: Parameters, states: States, buffers: bool) -> dict[str, Tensor]:
    """This rank's tensors, borrowed.

    parameters: the replica's, listed before training began: fully_shard temporarily replaces them by gathered ones,
    which the optimizer does not hold. buffers: also the modules' persistent buffers. Those (running means) differ
    between data-parallel ranks, so one of them saves its own. Raises TypeError if the optimizer keeps anything but
    tensors for a parameter.
    """
    tensors = model_tensors(replica.modules if buffers else (), parameters)
    for kind, state in states.items():
        for name, parameter in parameters.items():
            for key, value in state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{kind}.{name}.{key}"] = _placed(value, parameter)
                elif value is not None:  # None: the optimizer has not made this state yet.
                    raise TypeError(
                        f"the optimizer keeps {key} of {name} as {type(value).__name__}; it must be a tensor"
                    )
    return tensors


def _placed(value: Tensor, parameter: Tensor) -> Tensor:
    """A DTensor if `value` is plain and shaped like this rank's part of `parameter` (the outer state of DiLoCo)."""
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor) or value.shape != local(parameter).shape:
        return value
    place, shape = (parameter.device_mesh, parameter.placements), parameter.shape
    return DTensor.from_local(value, *place, run_check=False, shape=shape, stride=parameter.stride())


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
            parameter, dtype = parameters[name], meta.properties.dtype
            states[kind][parameter][of_state] = (
                torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
                if meta.size == parameter.shape
                else torch.empty(meta.size, dtype=dtype)  # A count, whole on every rank.
            )
    return collect_state(replica, parameters, states, buffers=True)


def list_tensors(reader: FileSystemReader) -> dict[str, TensorStorageMetadata]:
    """The tensors in storage, by their keys."""
    found = reader.read_metadata().state_dict_metadata
    return {key: meta for key, meta in found.items() if isinstance(meta, TensorStorageMetadata)}


def of_model(tensors: Mapping[str, T]) -> dict[str, T]:
    """Parameters and buffers alone."""
    return {key: each for key, each in tensors.items() if key.startswith(("model.", "buffer."))}


def differences(saved: Metadata, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> str:
    """The keys that only storage or only the ranks have, and other shapes; "" if all are alike.

    tensors: this rank's. Collective over the group.
    """
    of_ranks = gather({key: tensor.shape for key, tensor in tensors.items()}, group)
    wanted = {key: list(shape) for shapes in of_ranks for key, shape in shapes.items()}
    there = {key: list(meta.size) for key, meta in saved.items()}
    unlike = [key for key in wanted if key in there and there[key] != wanted[key]]
    texts = []
    for kind, found in (
        ("it lacks", [key for key in wanted if key not in there]),
        ("the model lacks", [key for key in there if key not in wanted]),
        ("of another shape:", [f"{key} is {there[key]} there and {wanted[key]} here" for key in unlike]),
    ):
        texts += [f"{kind} {first_few(found, _NAMES_SHOWN)}"] if found else []
    return "; ".join(texts)


def load_tensors(tensors: dict[str, Tensor], reader: FileSystemReader, group: dist.ProcessGroup | None = None) -> None:
    """Fill this rank's tensors, parts of wholes, from storage. Collective over the group, by default the world.

    Raises CheckpointError on all ranks alike.
    """
    try:
        load(tensors, storage_reader=reader, process_group=group)
    except CheckpointException as error:
        raise CheckpointError(f"{reader.checkpoint_id} cannot be loaded: {reasons(error)}") from error


def errors_of(error: BaseException) -> dict[int, BaseException]:
    """rank -> its error."""
    if isinstance(error, CheckpointException):
        return {rank: failure[0] for rank, failure in error.failures.items()}
    return {dist.get_rank(): error}


def reasons(error: BaseException) -> str:
    """One sentence about each rank's error."""
    return ", ".join(f"rank {rank}: {type(each).__name__}: {each}" for rank, each in errors_of(error).items())
