"""What a number was measured on: without it the number says little."""

import importlib.metadata
import os
import platform
from pathlib import Path


def describe_machine() -> dict[str, str | int]:
    return {"cpu": _cpu_model(), "cores": len(os.sched_getaffinity(0)), "kernel": platform.release()}


def describe_versions(torch_version: str) -> dict[str, str]:
    return {"netfold": _netfold_version(), "torch": torch_version, "python": platform.python_version()}


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        # x86 calls it so; aarch64 gives no name at all.
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _netfold_version() -> str:
    try:
        return importlib.metadata.version("netfold")
    except importlib.metadata.PackageNotFoundError:
        return "source tree"
