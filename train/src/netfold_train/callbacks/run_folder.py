"""Choose a run's folder, and write its recipe and environment (`netfold_train.runs` has the folder's files)."""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import socket
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist

from netfold_train.parallel.mesh import gather
from netfold_train.recipe import Recipe
from netfold_train.recipe.load import read_resolved
from netfold_train.runs import ENVIRONMENT, RECIPE, write_whole
from netfold_train.runs.machine import commit_of, describe_machine
from netfold_train.runs.metrics import is_held, read_metrics

_PACKAGES = ("netfold", "torch", "numpy", "pydantic")
# Names of settings whose values are secret.
_SECRET = re.compile("TOKEN|SECRET|KEY|PASSWORD")


def run_folder(recipe: Recipe) -> Path:
    """Choose the folder of a run and write its recipe and environment. The result is the same on every rank.

    `run.name` names the run, or else the model. Collective over the world if there is one: rank 0 chooses. Raises
    ValueError for a name or recipe that cannot be written, RuntimeError on all ranks if rank 0 cannot write.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    name, written = run_name(recipe), recipe.model_dump_json(indent=1)
    ranks = gather({"rank": rank, "host": socket.gethostname(), **describe_machine()})
    chosen: Path | str = ""
    if rank == 0:
        try:
            chosen = _choose(recipe, name)
            write_whole(chosen / RECIPE, written)
            _add_start(chosen / ENVIRONMENT, ranks)
        except OSError as error:
            chosen = f"no folder for the run could be made in {recipe.run.folder} (run.folder): {error}"
    folder = gather(chosen)[0]
    if isinstance(folder, str):
        raise RuntimeError(folder)
    return folder


def run_name(recipe: Recipe) -> str:
    """Raises ValueError if `run.name` is a path."""
    name = recipe.run.name or recipe.model.name.rpartition(":")[2]
    if name in ("", ".", "..") or name != Path(name).name:
        raise ValueError(f"run.name is {name!r}, which is not a folder's name: run.folder sets the place of runs")
    return name


def _choose(recipe: Recipe, name: str) -> Path:
    """The newest folder of this name if its run continues, else a new folder with the next number."""
    # A restart by torchrun continues, whatever the recipe says about earlier runs.
    continues = recipe.run.resume != "never" or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    newest: Path | None = None
    for number in itertools.count(1):
        folder = recipe.run.folder.absolute() / (name if number == 1 else f"{name}-{number}")
        if folder.exists():
            newest = folder
            continue
        if newest is not None and continues and _goes_on(newest, recipe):
            return newest
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:  # Another run of this name was faster.
            newest = None
    raise AssertionError("there is always a next number")


def _goes_on(folder: Path, recipe: Recipe) -> bool:
    """Whether the folder has an unfinished run of the same model on the same data that no process is writing."""
    try:
        before = read_resolved(folder)
    except (OSError, ValueError):  # Not a run's folder, or of another version of netfold.
        return False
    same = before.model == recipe.model and before.data == recipe.data
    return same and not read_metrics(folder).is_finished and not is_held(folder)


def _add_start(path: Path, ranks: list[dict[str, Any]]) -> None:
    """Add the environment of this start to the file. Secret settings appear without their value."""
    starts = json.loads(path.read_text(encoding="utf-8"))["starts"] if path.exists() else []
    versions = {name: import_module(name).__version__ for name in _PACKAGES}
    names = [name for name in sorted(os.environ) if re.match("NETFOLD_|OMP_NUM_THREADS$", name)]
    starts.append(
        {
            "time": round(time.time(), 3),
            "versions": {"python": platform.python_version(), **versions},
            "command": [os.path.basename(sys.orig_argv[0]), *sys.orig_argv[1:]],
            "commit": commit_of(Path.cwd()),
            "settings": {name: "(set, not shown)" if _SECRET.search(name) else os.environ[name] for name in names},
            "ranks": ranks,
        }
    )
    write_whole(path, json.dumps({"starts": starts}, indent=1))
