"""Where a run ran: versions, hosts, cores, settings. Written beside it, so that numbers can be held against others."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_PACKAGES = ("netfold", "torch", "numpy", "pydantic")
# Settings of ours whose value is nobody's business, by a part of their name.
_SECRET = ("TOKEN", "SECRET", "KEY", "PASSWORD")
_GIT_TIMEOUT_S = 5.0


def rank_facts(rank: int) -> dict[str, Any]:
    """Of this process's host: what all ranks gather."""
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu(),
        "kernel": platform.release(),
    }


def environment(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a run starts with, as JSON. ranks: `rank_facts` of each. No secret is in it: of settings whose name says
    that they are one, only that they are set."""
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
    """Of the folder that the run was started in, with a word where files differ from it; None where there is none."""
    try:
        commit = _git("rev-parse", "HEAD")
        return commit and commit + (" and changes" if _git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str | None:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=_GIT_TIMEOUT_S)
    return done.stdout.strip() if done.returncode == 0 else None
