"""A run's folder: what was asked for, where it ran, what came of it.

    RUN/recipe.toml        the recipe with all defaults; it can be run again
    RUN/environment.json   versions, hosts, cores, settings: one entry a start
    RUN/metrics.jsonl      steps, evaluations, notes (metrics_file.py)
    RUN/report.html        the page (report/), and profile.html of RUN/profile
    RUN/tensorboard, RUN/checkpoints

A folder's states: new -> unfinished -> finished, by the last line of metrics.jsonl: a run is finished when it "ended"
with "done". An unfinished one that nobody writes is gone on with by the next start of its name.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from netfold.train.callbacks.environment import environment, rank_facts
from netfold.train.callbacks.metrics_file import is_held, read_metrics
from netfold.train.recipe import Recipe
from netfold.train.recipe.serialize import NAME, read_resolved, to_toml

ENVIRONMENT = "environment.json"


def run_folder(recipe: Recipe, file: Path | None = None) -> Path:
    """Choose the folder of a run and write down what it begins with. The same on every rank.

    file: the recipe's, which names the run where `run.name` does not; without, the model's name does. Collective over
    the world where there is one: rank 0 chooses. Raises ValueError for a name or recipe that cannot be written,
    RuntimeError on all ranks where rank 0 cannot write.
    """
    size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if size > 1 else 0
    name, written = run_name(recipe, file), to_toml(recipe)
    facts: list[Any] = [rank_facts(rank)] * size
    if size > 1:
        dist.all_gather_object(facts, facts[0])
    said: list[str] = ["", ""]
    if rank == 0:
        try:
            said[0] = str(_begin(recipe, name, written, facts))
        except OSError as error:
            said[1] = f"no folder for the run could be made in {recipe.run.folder} (run.folder): {error}"
    if size > 1:
        dist.broadcast_object_list(said)
    folder, failed = said
    if failed:
        raise RuntimeError(failed)
    return Path(folder)


def run_name(recipe: Recipe, file: Path | None = None) -> str:
    """ValueError where `run.name` is a path."""
    name = recipe.run.name or (recipe.model.name.rpartition(":")[2] if file is None else file.stem)
    if name in ("", ".", "..") or name != Path(name).name:
        raise ValueError(f"run.name is {name!r}, which is no name of a folder: where runs are kept is run.folder's")
    return name


def _begin(recipe: Recipe, name: str, written: str, facts: list[Any]) -> Path:
    folder = _choose(recipe, name)
    _replace(folder / NAME, written)
    path = folder / ENVIRONMENT
    starts = json.loads(path.read_text(encoding="utf-8"))["starts"] if path.exists() else []
    starts.append({"time": round(time.time(), 3), **environment(facts)})
    _replace(path, json.dumps({"starts": starts}, indent=1))
    return folder


def _choose(recipe: Recipe, name: str) -> Path:
    """The newest of the name where it goes on, else a new one with the next number."""
    parent = recipe.run.folder.absolute()
    # Ranks that were started anew after one was lost go on, whatever the recipe says of runs before this one.
    is_restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    number, newest = 1, None
    while (there := _numbered(parent, name, number)).exists():
        number, newest = number + 1, there
    if newest is not None and (is_restart or recipe.run.resume != "never") and _goes_on(newest, recipe):
        return newest
    while True:
        try:
            there.mkdir(parents=True)
            return there
        except FileExistsError:  # another run of the name was quicker
            number += 1
            there = _numbered(parent, name, number)


def _numbered(parent: Path, name: str, number: int) -> Path:
    return parent / (name if number == 1 else f"{name}-{number}")


def _goes_on(folder: Path, recipe: Recipe) -> bool:
    """Whether it is an unfinished run of the same model on the same data, and nobody's now."""
    try:
        before = read_resolved(folder)
    except (OSError, ValueError):  # no folder of a run, or of another netfold's
        return False
    same = before.model == recipe.model and before.data == recipe.data
    return same and not read_metrics(folder).is_finished and not is_held(folder)


def _replace(path: Path, text: str) -> None:
    """Whole or not at all."""
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)
