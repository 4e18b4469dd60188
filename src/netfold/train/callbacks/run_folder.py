"""A run's folder: its recipe, its environment, its results.

    RUN/recipe.json        the recipe with all defaults; it can be run again
    RUN/environment.json   versions, hosts, cores, settings: one entry for each start
    RUN/metrics.jsonl      steps, evaluations, notes (metrics_file.py)
    RUN/report.html        the page (report/), and profile.html of RUN/profile
    RUN/tensorboard, RUN/checkpoints

A run is finished when the last line of metrics.jsonl is "ended" with "done". The next start of the same name continues
an unfinished run that no process is writing.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch.distributed as dist

from netfold.train.callbacks.metrics_file import is_held, read_metrics
from netfold.train.recipe import Recipe
from netfold.train.recipe.load import RESOLVED, read_resolved

ENVIRONMENT = "environment.json"
_PACKAGES = ("netfold", "torch", "numpy", "pydantic")
# Parts of the names of settings whose values are secret.
_SECRET = ("TOKEN", "SECRET", "KEY", "PASSWORD")
_GIT_TIMEOUT_S = 5.0


def run_folder(recipe: Recipe, file: Path | None = None) -> Path:
    """Choose the folder of a run and write its recipe and environment. The result is the same on every rank.

    file: the recipe's file, which names the run unless `run.name` does; without a file the model does. Collective over
    the world if there is one: rank 0 chooses. Raises ValueError for a name or recipe that cannot be written,
    RuntimeError on all ranks if rank 0 cannot write.
    """
    size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if size > 1 else 0
    name, written = run_name(recipe, file), recipe.model_dump_json(indent=1)
    facts: list[Any] = [rank_facts(rank)] * size
    if size > 1:
        dist.all_gather_object(facts, facts[0])
    chosen: list[str] = ["", ""]
    if rank == 0:
        try:
            chosen[0] = str(_begin(recipe, name, written, facts))
        except OSError as error:
            chosen[1] = f"no folder for the run could be made in {recipe.run.folder} (run.folder): {error}"
    if size > 1:
        dist.broadcast_object_list(chosen)
    folder, failed = chosen
    if failed:
        raise RuntimeError(failed)
    return Path(folder)


def run_name(recipe: Recipe, file: Path | None = None) -> str:
    """Raises ValueError if `run.name` is a path."""
    name = recipe.run.name or (recipe.model.name.rpartition(":")[2] if file is None else file.stem)
    if name in ("", ".", "..") or name != Path(name).name:
        raise ValueError(f"run.name is {name!r}, which is not a folder's name: run.folder sets the place of runs")
    return name


def _begin(recipe: Recipe, name: str, written: str, facts: list[Any]) -> Path:
    folder = _choose(recipe, name)
    _replace(folder / RESOLVED, written)
    path = folder / ENVIRONMENT
    starts = json.loads(path.read_text(encoding="utf-8"))["starts"] if path.exists() else []
    starts.append({"time": round(time.time(), 3), **environment(facts)})
    _replace(path, json.dumps({"starts": starts}, indent=1))
    return folder


def _choose(recipe: Recipe, name: str) -> Path:
    """The newest folder of this name if its run continues, else a new folder with the next number."""
    parent = recipe.run.folder.absolute()
    # A restart by torchrun continues, whatever the recipe says about earlier runs.
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
        except FileExistsError:  # Another run of this name was faster.
            number += 1
            there = _numbered(parent, name, number)


def _numbered(parent: Path, name: str, number: int) -> Path:
    return parent / (name if number == 1 else f"{name}-{number}")


def _goes_on(folder: Path, recipe: Recipe) -> bool:
    """Whether the folder has an unfinished run of the same model on the same data that no process is writing."""
    try:
        before = read_resolved(folder)
    except (OSError, ValueError):  # Not a run's folder, or of another version of netfold.
        return False
    same = before.model == recipe.model and before.data == recipe.data
    return same and not read_metrics(folder).is_finished and not is_held(folder)


def _replace(path: Path, text: str) -> None:
    """Write a file completely or not at all."""
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


def rank_facts(rank: int) -> dict[str, Any]:
    """Facts about this process's host, which all ranks gather."""
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu(),
        "kernel": platform.release(),
    }


def environment(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The environment at a run's start, as JSON. ranks: `rank_facts` of each.

    Secret settings appear without their value.
    """
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "command": [os.path.basename(sys.argv[0]), *sys.argv[1:]] if sys.argv else [],
        "commit": _commit(),
        "settings": _settings(),
        "ranks": list(ranks),
    }


def _settings() -> dict[str, str]:
    chosen = {name: value for name, value in sorted(os.environ.items()) if name.startswith("NETFOLD_")}
    if "OMP_NUM_THREADS" in os.environ:
        chosen["OMP_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"]
    return {
        name: "(set, not shown)" if any(word in name for word in _SECRET) else value for name, value in chosen.items()
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "?")
    except OSError:
        return "?"


def _commit() -> str | None:
    """The commit of the current folder, marked if files differ; None outside a repository."""
    try:
        commit = _git("rev-parse", "HEAD")
        return commit and commit + (" and changes" if _git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str | None:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=_GIT_TIMEOUT_S)
    return done.stdout.strip() if done.returncode == 0 else None
