"""Start a run from other weights: a run's newest checkpoint, or safetensors, also those of a model of Hugging Face.

A rank reads only the parts that it holds, under any split. Names and shapes must be the model's, except names that
begin as `training.initial_except` says (a new head): those tensors keep the values that the model was made with.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from netfold.extras import need
from netfold_train.checkpoint.atomic import find_checkpoint, find_damage
from netfold_train.checkpoint.state import Metadata, differences, list_tensors, load_tensors, of_model
from netfold_train.models.model import Weights
from netfold_train.parallel.mesh import gather
from netfold_train.recipe import Training

T = TypeVar("T")
SUFFIX = ".safetensors"


def load_initial(asked: Training, tensors: Mapping[str, Tensor], weights: Weights | None = None) -> str:
    """Fill this rank's tensors (`model_tensors`) in place; return a sentence about their source.

    weights: the model's own (`Model.weights`), in place of `training.initial`. Collective over the world. Raises
    ValueError if the weights are damaged or do not fit the model, with the names.
    """
    if weights is not None:
        asked = asked.model_copy(update={"initial": weights.folder, "initial_except": []})
    reader, saved, wanted = _open(asked, tensors)
    path = Path(reader.path)
    if not isinstance(reader, HuggingFaceStorageReader):
        damage = next(filter(None, gather(find_damage(path, dist.get_rank(), dist.get_world_size()))), "")
        if damage:
            raise ValueError(f"training.initial: {path} is damaged: {damage}")
    rounds = [wanted] if weights is None else _rounds(weights.names, wanted)
    _check(asked, path, saved, rounds[0])
    for each in rounds:
        load_tensors(each, reader)
    left = "" if not asked.initial_except else f", except {', '.join(asked.initial_except)}"
    key = "training.initial" if weights is None else "model.pretrained"
    return f"starts with the weights of {path}{left} ({key})"


def check_initial(asked: Training, tensors: Mapping[str, Tensor]) -> None:
    """Raise `load_initial`'s ValueError for weights that do not fit; no weights are read."""
    reader, saved, wanted = _open(asked, tensors)
    _check(asked, Path(reader.path), saved, wanted)


def _open(asked: Training, tensors: Mapping[str, Tensor]) -> tuple[FileSystemReader, Metadata, dict[str, Tensor]]:
    """(the reader, the tensors that it has, the tensors to load by its keys)."""
    path = asked.initial
    assert path is not None
    if path.suffix == SUFFIX or any(path.glob(f"*{SUFFIX}")):
        if not path.exists():
            raise ValueError(f"training.initial: {path}: there is no such file")
        need("training.initial", ["safetensors"], "train")
        reader: FileSystemReader = HuggingFaceStorageReader(str(path))
        reader.fs = _Files()
        return reader, _without(asked, list_tensors(reader)), _without(asked, _bare(tensors))
    try:
        reader = FileSystemReader(find_checkpoint(path))
    except ValueError as error:
        raise ValueError(f"training.initial: {error}; give a run's folder, or safetensors") from None
    return reader, _without(asked, of_model(list_tensors(reader))), _without(asked, tensors)


def _rounds(names: Mapping[str, str], tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Tensors by their names in the files, as many times as one name there is of several tensors.

    names: of all ranks' tensors, so that every rank has as many rounds. The first has every name in the files.
    """
    rounds: list[dict[str, Tensor]] = []
    left = dict(names)
    while left:
        # The last of several is taken first; which one does not matter.
        now = {source: name for name, source in left.items()}
        rounds.append({source: tensors[name] for source, name in now.items() if name in tensors})
        left = {name: source for name, source in left.items() if now[source] != name}
    return rounds


def _check(asked: Training, path: Path, saved: Metadata, wanted: Mapping[str, Tensor]) -> None:
    unlike = differences(saved, wanted)
    if unlike:
        raise ValueError(
            f'training.initial: {path} does not fit the model: {unlike}; training.initial_except = ["layers.head."] '
            "leaves names out that begin so"
        )


def _bare(tensors: Mapping[str, T]) -> dict[str, T]:
    """By the names of the model: safetensors do not tell parameters from buffers."""
    return {key.partition(".")[2]: each for key, each in tensors.items()}


def _without(asked: Training, tensors: Mapping[str, T]) -> dict[str, T]:
    left_out = tuple(kind + prefix for prefix in asked.initial_except for kind in ("", "model.", "buffer."))
    return {key: each for key, each in tensors.items() if not key.startswith(left_out)}


class _Files(FileSystem):
    """A file is listed as a folder of this file alone."""

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        return [str(path)] if Path(path).is_file() else super().ls(path)
