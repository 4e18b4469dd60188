"""Choose a run's folder, and write its recipe and environment (`netfold.runs` has the folder's files)."""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import socket
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist

from netfold.runs import ENVIRONMENT, RECIPE, write_whole
from netfold.runs.metrics import is_held, read_metrics
from netfold.train.recipe import Recipe
from netfold.train.recipe.load import read_resolved

_PACKAGES = ("netfold", "torch", "numpy", "pydantic")
# Names of settings whose values are secret.
_SECRET = re.compile("TOKEN|SECRET|KEY|PASSWORD")
_GIT_TIMEOUT_S = 5.0


def run_folder(recipe: Recipe) -> Path:
    """Choose the folder of a run and write its recipe and environment. The result is the same on every rank.

    `run.name` names the run, or else the model. Collective over the world if there is one: rank 0 chooses. Raises
    ValueError for a name or recipe that cannot be written, RuntimeError on all ranks if rank 0 cannot write.
    """
    size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if size > 1 else 0
    name, written = run_name(recipe), recipe.model_dump_json(indent=1)
    ranks: list[Any] = [_rank_facts(rank)] * size
    if size > 1:
        dist.all_gather_object(ranks, ranks[0])
    chosen: list[Any] = [None, ""]
    if rank == 0:
        try:
            chosen[0] = _choose(recipe, name)
            write_whole(chosen[0] / RECIPE, written)
            _add_start(chosen[0] / ENVIRONMENT, ranks)
        except OSError as error:
            chosen[1] = f"no folder for the run could be made in {recipe.run.folder} (run.folder): {error}"
    if size > 1:
        dist.broadcast_object_list(chosen)
    folder, failed = chosen
    if failed:
        raise RuntimeError(failed)
    return Path(folder)


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
            "commit": _commit(),
            "settings": {name: "(set, not shown)" if _SECRET.search(name) else os.environ[name] for name in names},
            "ranks": ranks,
        }
    )
    write_whole(path, json.dumps({"starts": starts}, indent=1))


def _rank_facts(rank: int) -> dict[str, Any]:
    """Facts about this process's host, which all ranks gather."""
    cpu = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "cores": len(os.sched_getaffinity(0)),
        "cpu": cpu[1] if cpu is not None else platform.machine(),
        "kernel": platform.release(),
    }


def _commit() -> str | None:
    """The commit of the current folder, marked if files differ; None outside a repository."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty= and changes"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_GIT_TIMEOUT_S)
        return done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
