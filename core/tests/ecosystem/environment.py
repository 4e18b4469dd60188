"""The frameworks' versions here, and the settings and processes of a framework's run."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil

# In the environment of every process of a run.
MARK = "NETFOLD_ECOSYSTEM_RUN"


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def why_missing(package: str) -> str:
    reason = Path(sys.prefix) / "missing" / package
    return reason.read_text().strip() if reason.exists() else f"{package} is not installed (make test-ecosystem)"


@contextlib.contextmanager
def settings() -> Iterator[dict[str, str]]:
    """Offline, without telemetry, one thread per rank, and with every file that a framework leaves in one folder."""
    # Ray's sockets have this path in their names, and 107 bytes for it.
    with tempfile.TemporaryDirectory(prefix="eco", dir="/tmp") as folder:
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("NETFOLD_", "RAY_", "WANDB_"))
        }
        yield kept | {
            MARK: uuid.uuid4().hex,
            # DeepSpeed calls ninja.
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": folder,
            "HOME": folder,
            "HF_HUB_OFFLINE": "1",
            "WANDB_MODE": "disabled",
            "RUST_LOG": "warn",
            "DS_ACCELERATOR": "cpu",
            "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix) / "torch_extensions"),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
            "RAY_TMPDIR": folder,
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "240",
        }


def processes_of(mark: str) -> list[psutil.Process]:
    """Of every process of a run: daemons leave its session, and keep its environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                found.append(process)
    return found
