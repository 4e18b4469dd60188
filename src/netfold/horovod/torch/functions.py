"""Give all ranks one rank's parameters, optimizer state or objects."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from netfold.horovod.torch.exchange import allgather_async, broadcast_, broadcast_all
from netfold.horovod.torch.handles import synchronize
from netfold.horovod.torch.process_sets import ProcessSet, global_process_set
from netfold.horovod.torch.world import rank


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Replace tensors by the root's: of a `state_dict()`, `named_parameters()` or a list of tensors.

    By names, in their order, so that ranks need not list them alike; without names in the given order. Entries that are
    no tensors are left alone.
    """
    if isinstance(params, Mapping):
        pairs = sorted(params.items())
    elif isinstance(params, Iterable):
        pairs = [each if isinstance(each, tuple) else (str(i), each) for i, each in enumerate(params)]
    else:
        raise ValueError(
            f"parameters come as a dict or as pairs of a name and a tensor, not as {type(params).__name__}"
        )
    broadcast_all([each.data for _, each in pairs if isinstance(each, torch.Tensor)], root_rank, None, process_set)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Replace an optimizer's state and options (learning rates) by the root's.

    A rank whose optimizer has made no step yet gets the root's state all the same; no step is made here. model: taken
    for Horovod's scripts' sake.
    """
    state = optimizer.state_dict()
    tensors: list[torch.Tensor] = []
    described = broadcast_object(_described(state, tensors), root_rank, process_set=process_set)
    if rank() == root_rank:
        broadcast_all(tensors, root_rank, None, process_set)
        return
    received: list[torch.Tensor] = []
    filled = _filled(described, received)
    broadcast_all(received, root_rank, None, process_set)
    optimizer.load_state_dict(filled)


class _Described:
    """In a tensor's place: its shape and dtype."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype


def _described(value: Any, tensors: list[torch.Tensor]) -> Any:
    """A state with its dense tensors taken out, in order."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        tensors.append(value.detach().cpu().contiguous())
        return _Described(value)
    if isinstance(value, dict):
        return {key: _described(each, tensors) for key, each in value.items()}
    if isinstance(value, list):
        return [_described(each, tensors) for each in value]
    return value


def _filled(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, _Described):
        tensors.append(torch.empty(value.shape, dtype=value.dtype))
        return tensors[-1]
    if isinstance(value, dict):
        return {key: _filled(each, tensors) for key, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, tensors) for each in value]
    return value


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The root's object on every rank, by pickle: only from ranks of this job, which have proved that they are."""
    mine = rank() == root_rank
    pickled = bytearray(_pickled(obj)) if mine else bytearray()
    length = torch.tensor([len(pickled)], dtype=torch.int64)
    broadcast_(length, root_rank, name and f"{name}.sz", process_set)
    content = torch.frombuffer(pickled, dtype=torch.uint8) if mine else torch.empty(int(length), dtype=torch.uint8)
    broadcast_(content, root_rank, name and f"{name}.t", process_set)
    return obj if mine else _unpickled(content)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Every rank's object, in rank order, by pickle."""
    content = torch.frombuffer(bytearray(_pickled(obj)), dtype=torch.uint8)
    lengths = allgather_async(torch.tensor([len(content)]), name and f"{name}.sz", process_set)
    contents = allgather_async(content, name and f"{name}.t", process_set)
    return [_unpickled(part) for part in torch.split(synchronize(contents), synchronize(lengths).tolist())]


def _pickled(obj: Any) -> bytes:
    try:
        import cloudpickle  # takes functions and classes of a script, as Horovod does, where it is installed
    except ImportError:
        return pickle.dumps(obj)
    return bytes(cloudpickle.dumps(obj))


def _unpickled(content: torch.Tensor) -> Any:
    return pickle.load(io.BytesIO(content.numpy().tobytes()))
