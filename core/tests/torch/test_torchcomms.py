"""`TORCH_DISTRIBUTED_USE_TORCHCOMMS=1`: torch asks torchcomms for backends before it asks netfold.

The torchcomms that pip installs (0.0.1) raises at import, so a stand-in has here the four names that torch imports. It
answers for a backend that it does not have as torchcomms does (`_load_backend`, `is_backend_built`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import load
import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch

SCRIPT = """
import sys, torch, torch.distributed as dist
dist.init_process_group("netfold", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
tensor = torch.arange(3.0)
dist.all_reduce(tensor)
print(dist.get_backend(), tensor.tolist())
dist.destroy_process_group()
"""

STAND_IN = {
    "__init__.py": """
from torchcomms._comms import new_comm

def is_backend_built(backend):
    return False
""",
    "_comms.py": """
def new_comm(backend, device, **options):
    raise ModuleNotFoundError(f"failed to find backend {backend}, is it registered via entry_points.txt?")

class _BackendWrapper:
    pass

def _is_backend_registered(backend):
    return False
""",
    "hooks.py": """
class FlightRecorderHook:
    pass
""",
}


def run(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NETFOLD_")}
    return load.run(
        [sys.executable, "-c", SCRIPT, folder],
        120,
        env=kept | {"TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1"} | environment,
    )


def test_without_torchcomms_torch_ignores_the_variable(tmp_path: Path) -> None:
    ended = run(tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "netfold [0.0, 1.0, 2.0]"


@pytest.mark.skipif(
    not hasattr(torch.distributed.distributed_c10d, "_use_torchcomms_enabled"), reason="this torch knows no torchcomms"
)
def test_with_torchcomms_torch_refuses_netfold_or_leaves_it_alone(tmp_path: Path) -> None:
    """torch 2.12 and 2.13 take every backend from torchcomms; 2.15 takes those alone that torchcomms has."""
    package = tmp_path / "packages" / "torchcomms"
    package.mkdir(parents=True)
    for name, text in STAND_IN.items():
        (package / name).write_text(text)
    ended = run(tmp_path, PYTHONPATH=os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")]))
    if hasattr(torch.distributed.distributed_c10d, "_torchcomms_handles_backend"):
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.strip() == "netfold [0.0, 1.0, 2.0]"
    else:
        assert ended.returncode != 0
        assert "failed to find backend netfold" in ended.stderr
