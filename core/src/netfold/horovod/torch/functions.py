"""Copy one rank's parameters, optimizer state or objects to all ranks."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils import _pytree

from netfold.horovod.torch.operations import allgather_async, broadcast_, broadcast_all, synchronize
from netfold.horovod.torch.world import ProcessSet, global_process_set, rank


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Replace tensors by the root's: those of a `state_dict()`, of `named_parameters()` or of a list of tensors.

    A dict is sorted by name, so ranks may list its tensors in different orders. A list keeps its order. Entries that
    are no tensors are not changed.
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

    Makes no step: a rank whose optimizer has made no step yet gets the root's state, too.
    model: has no effect; Horovod's scripts pass it.
    """
    leaves, tree = _pytree.tree_flatten(optimizer.state_dict())
    leaves = [leaf.detach().cpu().contiguous() if _is_dense(leaf) else leaf for leaf in leaves]
    # A pickled meta tensor holds shape and dtype. The values follow as tensors.
    outline = [leaf.to("meta") if _is_dense(leaf) else leaf for leaf in leaves], tree
    roots, tree = broadcast_object(outline, root_rank, process_set=process_set)
    is_root = rank() == root_rank
    if not is_root:
        leaves = [torch.empty_like(leaf, device="cpu") if _is_dense(leaf) else leaf for leaf in roots]
    broadcast_all([leaf for leaf in leaves if _is_dense(leaf)], root_rank, None, process_set)
    if not is_root:
        optimizer.load_state_dict(_pytree.tree_unflatten(leaves, tree))


def _is_dense(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the root's object, by pickle. Only authenticated ranks of this job can send one."""
    is_root = rank() == root_rank
    content = _pickled(obj) if is_root else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([len(content)], dtype=torch.int64)
    broadcast_(length, root_rank, name and f"{name}.sz", process_set)
    content = content if is_root else torch.empty(int(length), dtype=torch.uint8)
    broadcast_(content, root_rank, name and f"{name}.t", process_set)
    return obj if is_root else pickle.loads(content.numpy().data)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return every rank's object, in rank order, by pickle."""
    content = _pickled(obj)
    lengths = allgather_async(torch.tensor([len(content)]), name and f"{name}.sz", process_set)
    contents = allgather_async(content, name and f"{name}.t", process_set)
    parts = torch.split(synchronize(contents), synchronize(lengths).tolist())
    return [pickle.loads(part.numpy().data) for part in parts]


def _pickled(obj: Any) -> torch.Tensor:
    """Pickle an object: [bytes] u8."""
    try:
        import cloudpickle as pickler  # if installed, as in Horovod: it takes a script's functions and classes
    except ImportError:
        pickler = pickle
    return torch.frombuffer(bytearray(pickler.dumps(obj)), dtype=torch.uint8)
