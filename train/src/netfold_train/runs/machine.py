"""Describes what a number was measured on: machine, commit, load."""

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def describe_machine() -> dict[str, str | int]:
    return {"cpu": _cpu_model(), "cores": len(os.sched_getaffinity(0)), "kernel": platform.release()}


def congestion_control() -> str:
    """Return what new TCP connections use, in this process's network namespace."""
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()


def congestion_controls() -> list[str]:
    """Return what TCP connections could use."""
    return Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()


def commit_of(folder: Path) -> str | None:
    """Return the commit of a folder, with a + where files have been changed since; None outside of a repository."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def describe_versions(others: Mapping[str, str]) -> dict[str, str]:
    """Return the versions of netfold and Python, the commit, and `others`, such as torch's."""
    ours = {
        "netfold": _netfold_version(),
        "commit": commit_of(Path(__file__).parent) or "unknown",
        "python": platform.python_version(),
    }
    return {**ours, **others}


def spoken(load_before: float) -> str:
    """Return the sentence below a table: the whole machine, versions, load before and now."""
    machine = {**describe_machine(), "cores": os.cpu_count()}
    return f"{in_words(machine, (load_before, os.getloadavg()[0]), describe_versions({}))}."


def in_words(machine: Mapping[str, Any], load: tuple[float, float], versions: Mapping[str, str]) -> str:
    """Return what `describe_machine` and `describe_versions` found, as a part of a sentence."""
    return (
        f"{machine['cores']} cores of {machine['cpu']} for all of it, Linux {machine['kernel']}, load {load[0]:.1f} to "
        f"{load[1]:.1f}; {', '.join(f'{name} {version}' for name, version in versions.items())}"
    )


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        # x86 has this line; aarch64 has no name at all.
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _netfold_version() -> str:
    try:
        return importlib.metadata.version("netfold")
    except importlib.metadata.PackageNotFoundError:
        return "source tree"
