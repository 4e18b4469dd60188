"""Export a checkpoint's weights as safetensors, which any program reads, without starting ranks.

OUT/model.safetensors                     or, above SHARD_BYTES, as Hugging Face divides a model:
OUT/model-00001-of-00003.safetensors      and OUT/model.safetensors.index.json
OUT/recipe.json                           the run's recipe: its [model] makes the module that the weights are of
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint._hf_utils import DTYPE_MAP
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from netfold.runs import RECIPE
from netfold.train.checkpoint.atomic import PART, find_checkpoint, find_damage, read_manifest
from netfold.train.checkpoint.state import list_tensors, of_model

# Hugging Face's limit of a file.
SHARD_BYTES = 5 * 10**9
_NAMES = {torch.bool: "BOOL", **{dtype: name for name, dtype in DTYPE_MAP.items()}}


@dataclass(frozen=True)
class Export:
    """The result of an export."""

    step: int
    tensors: int
    size_bytes: int
    files: int


@dataclass(frozen=True)
class _Entry:
    """A tensor of a file."""

    key: str
    """In the checkpoint."""
    shape: torch.Size
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def export(run: Path, out: Path, dtype: torch.dtype | None = None, *, ema: bool = False) -> Export:
    """Write the weights and buffers of the newest complete checkpoint in `run`'s folder to `out`, a new folder.

    run: a run's folder, or one of its checkpoints. dtype: of the parameters; without it as they were saved (f32).
    Buffers keep their types. ema: the averages of the weights ("ema" of `OptimizerStep.states`) instead of the weights.
    Holds one tensor in memory at a time. `out` is complete or absent. Raises ValueError, OSError.
    """
    checkpoint = find_checkpoint(run)
    damage = find_damage(checkpoint, 0, 1)
    if damage:
        raise ValueError(f"{checkpoint} is damaged: {damage}")
    if out.exists():
        raise ValueError(f"{out} exists; give a new folder")
    position, _ = read_manifest(checkpoint)
    reader = FileSystemReader(checkpoint)
    entries = _entries(reader, dtype, ema=ema)
    files = _divide(entries)
    part = out.with_name(out.name + PART)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        for name, names in files.items():
            _write(part / name, {each: entries[each] for each in names}, reader)
        if len(files) > 1:
            index = {"total_size": sum(each.size_bytes for each in entries.values())}
            weight_map = {each: name for name, names in files.items() for each in names}
            text = json.dumps({"metadata": index, "weight_map": weight_map}, indent=1)
            (part / "model.safetensors.index.json").write_text(text)
        (part / RECIPE).write_text(json.dumps(position.recipe, indent=1))
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return Export(position.step, len(entries), sum(each.size_bytes for each in entries.values()), len(files))


def _entries(reader: FileSystemReader, dtype: torch.dtype | None, *, ema: bool) -> dict[str, _Entry]:
    """name in the model -> its tensor."""
    saved = list_tensors(reader)
    entries = {}
    for key, meta in of_model(saved).items():
        kind, _, name = key.partition(".")
        if kind == "model" and ema:
            # An average has the shape of its weight; other state of the average (a count) has not.
            found = [each for each in saved if each.startswith(f"ema.{name}.") and saved[each].size == meta.size]
            if not found:
                raise ValueError(f"{reader.path} has no average of {name}: was the run without EMA?")
            key, meta = found[0], saved[found[0]]
        kept = meta.properties.dtype
        entries[name] = _Entry(key, meta.size, dtype if kind == "model" and dtype and kept.is_floating_point else kept)
    return entries


def _divide(entries: dict[str, _Entry]) -> dict[str, list[str]]:
    """file -> its names, in their order: at most SHARD_BYTES, or one tensor."""
    runs: list[list[str]] = [[]]
    size = 0
    for name, entry in entries.items():
        if runs[-1] and size + entry.size_bytes > SHARD_BYTES:
            runs.append([])
            size = 0
        runs[-1].append(name)
        size += entry.size_bytes
    if len(runs) == 1:
        return {"model.safetensors": runs[0]}
    return {f"model-{number:05d}-of-{len(runs):05d}.safetensors": names for number, names in enumerate(runs, 1)}


def _write(path: Path, entries: dict[str, _Entry], reader: FileSystemReader) -> None:
    """Write one file of the format: its header's length (u64), the header (JSON, padded to 8 bytes), the values.

    The safetensors package writes only tensors that are all in memory.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, entry in entries.items():
        begin, end = end, end + entry.size_bytes
        header[name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries.values():
            tensor = torch.empty(entry.shape, dtype=entry.dtype)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns that no ranks take part.
                # The values are converted as they are copied.
                load({entry.key: tensor}, storage_reader=reader, no_dist=True)
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
