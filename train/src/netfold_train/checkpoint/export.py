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
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from netfold.units import plural
from netfold_train.checkpoint.atomic import PART, find_checkpoint, find_damage, read_manifest
from netfold_train.checkpoint.state import list_tensors, of_model
from netfold_train.runs import RECIPE

# Hugging Face's limit of a file.
SHARD_BYTES = 5 * 10**9


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


def export(run: Path, out: Path, dtype: torch.dtype | None = None, *, ema: bool = False) -> str:
    """Write the weights and buffers of the newest complete checkpoint in `run`'s folder to `out`, a new folder.

    run: a run's folder, or one of its checkpoints. dtype: of the parameters; without it as they were saved (f32).
    Buffers keep their types. ema: the averages of trained weights (`training.ema`) instead of these.
    Holds the tensors of one file in memory at a time. `out` is complete or absent. Returns a sentence about it. Raises
    ValueError, OSError.
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
    size_bytes = sum(each.size_bytes for each in entries.values())
    files = _divide(entries)
    part = out.with_name(out.name + PART)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        for name, names in files.items():
            _write(part / name, {each: entries[each] for each in names}, reader)
        if len(files) > 1:
            weight_map = {each: name for name, names in files.items() for each in names}
            index = {"metadata": {"total_size": size_bytes}, "weight_map": weight_map}
            (part / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        (part / RECIPE).write_text(json.dumps(position.recipe, indent=1))
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    size = f"{size_bytes / 1e6:.1f} MB in {plural(len(files), 'file')}"
    return f"{out}: {plural(len(entries), 'tensor')} of step {position.step}, {size}"


def _entries(reader: FileSystemReader, dtype: torch.dtype | None, *, ema: bool) -> dict[str, _Entry]:
    """name in the model -> its tensor."""
    saved = list_tensors(reader)
    if ema and not any(key.startswith("ema.") for key in saved):
        raise ValueError(f"{reader.path} has no averages of weights: the run was without training.ema")
    entries = {}
    for key, meta in of_model(saved).items():
        kind, _, name = key.partition(".")
        # A frozen parameter has no average.
        average = f"ema.{name}.average"
        if kind == "model" and ema and average in saved:
            key, meta = average, saved[average]
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
    tensors = {name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in entries.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that no ranks take part.
        # The values are converted as they are copied.
        load({entries[name].key: each for name, each in tensors.items()}, storage_reader=reader, no_dist=True)
    save_file(tensors, path, {"format": "pt"})
    with path.open("rb") as file:
        os.fsync(file)
