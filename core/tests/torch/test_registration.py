"""`import torch` with netfold installed: it registers a backend, and loads nothing heavy."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys

import pytest
from load import seconds
from ranks import run_ranks, values

pytestmark = pytest.mark.torch


def run(script: str, **environment: str) -> str:
    import os

    env = {name: value for name, value in os.environ.items() if not name.startswith("NETFOLD_")} | environment
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=seconds(60), env=env)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def _printed(rank: int, size: int, folder: str, script: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(script, {"__name__": "__main__"})
    return printed.getvalue()


def run_forked(script: str) -> str:
    """As `run`, in a process that is forked with torch imported. Not for tests of the import or the process's end."""
    (printed,) = values(run_ranks(_printed, 1, script))
    return str(printed)


def test_import_torch_registers_the_backend_and_loads_nothing_native() -> None:
    said = run(
        "import threading, torch, sys, torch.distributed as dist\n"
        "print(dist.is_backend_available('netfold'))\n"
        "print(sorted(name for name in sys.modules if name.startswith('netfold')))\n"
        "print(threading.active_count())\n"
    ).splitlines()
    assert said[0] == "True"
    assert "netfold._native" not in said[1]
    assert "netfold.torch.operations" not in said[1]
    assert "netfold.communicator" not in said[1]
    assert said[2] == "1", "no thread: suites fork after import"


def test_registration_costs_little(capsys: pytest.CaptureFixture[str]) -> None:
    took_ms = float(
        run(
            "import time, torch\n"
            "began = time.process_time()\n"
            "import netfold.torch\n"
            "netfold.torch.register()\n"
            "print((time.process_time() - began) * 1e3)\n",
            TORCH_DEVICE_BACKEND_AUTOLOAD="0",
        )
    )
    with capsys.disabled():
        print(f"\nregistration: {took_ms:.2f} ms of CPU (the aim is 5)")
    assert took_ms < 100


def test_registration_may_happen_twice_and_never_raises() -> None:
    said = run_forked(
        "import warnings, torch, netfold.torch, torch.distributed as dist\n"
        "netfold.torch.register(); netfold.torch.register()\n"
        "del dist.Backend.NETFOLD\n"
        "def broken(*arguments, **options): raise KeyError('changed in torch 99')\n"
        "dist.Backend.register_backend = broken\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    netfold.torch.register()\n"
        "print(caught[0].message)\n"
    )
    assert said.strip() == "netfold could not register with torch.distributed: 'changed in torch 99'"


def test_a_backend_for_each_device_can_be_named() -> None:
    said = run_forked(
        "import torch, torch.distributed as dist\n"
        "print(dist.BackendConfig(dist.Backend('cpu:netfold,cuda:nccl')).get_device_backend_map())\n"
        "print(dist.BackendConfig(dist.Backend('netfold')).get_device_backend_map())\n"
    )
    both, alone = said.splitlines()
    assert "'cpu': 'netfold'" in both and "'cuda': 'nccl'" in both
    assert "'cpu': 'netfold'" in alone


def test_importing_netfold_needs_no_torch() -> None:
    assert (
        run(
            "import sys, netfold\nnetfold.Communicator\nprint('torch' in sys.modules)\n",
        ).strip()
        == "False"
    )


def test_init_process_group_raises_for_impossible_settings() -> None:
    settings = {
        "NETFOLD_SWITCH=nonsense": "ValueError: NETFOLD_SWITCH is 'nonsense'; expected host:port",
        "NETFOLD_ALGORITHM=nonsense": "ValueError: NETFOLD_ALGORITHM='nonsense' is not one of",
        "NETFOLD_ALGORITHM=in_network": "ValueError: NETFOLD_ALGORITHM=in_network needs an aggregator",
        "NETFOLD_JOIN_TIMEOUT_S=soon": "ValueError: NETFOLD_JOIN_TIMEOUT_S='soon' is not a number of seconds",
    }
    said = run_forked(
        "import os, tempfile, torch, torch.distributed as dist\n"
        f"for setting in {list(settings)}:\n"
        "    name, _, word = setting.partition('=')\n"
        "    os.environ[name] = word\n"
        "    try:\n"
        "        dist.init_process_group('netfold', init_method=f'file://{tempfile.mktemp()}', rank=0, world_size=1)\n"
        "    except Exception as error:\n"
        "        print(f'{type(error).__name__}: {error}')\n"
        "    del os.environ[name]\n",
    ).splitlines()
    for line, words in zip(said, settings.values(), strict=True):
        assert words in line


def test_pg_options_of_another_kind_are_refused() -> None:
    said = run_forked(
        "import tempfile, torch, torch.distributed as dist\n"
        "try:\n"
        "    dist.init_process_group('netfold', init_method=f'file://{tempfile.mktemp()}', rank=0, world_size=1,\n"
        "                            pg_options={'algorithm': 'ring'})\n"
        "except Exception as error:\n"
        "    print(f'{type(error).__name__}: {error}')\n",
    )
    assert said.strip() == "TypeError: pg_options must be netfold.Options, not dict"


def test_a_process_that_forgets_to_destroy_its_group_ends() -> None:
    assert (
        run(
            "import tempfile, torch, torch.distributed as dist\n"
            "dist.init_process_group('netfold', init_method=f'file://{tempfile.mktemp()}', rank=0, world_size=1)\n"
            "works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(10)]\n"
            "print(works[-1].get_future().wait()[0].sum().item())\n"
        ).strip()
        == "1000.0"
    )
