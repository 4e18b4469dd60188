"""`netfold nccl-env`: the variables, and that a loader finds the plugin by them as NCCL does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from load import seconds
from nccl.loader import shared_object
from typer.testing import CliRunner

from netfold.cli import app, nccl_env

AS_NCCL = """
import ctypes, os
name = f"libnccl-net-{os.environ['NCCL_NET_PLUGIN']}.so"
ctypes.CDLL(name).ncclNetPlugin_v8
print(name, os.environ.get("NCCL_NET"), os.environ["LD_LIBRARY_PATH"].count(":"))
"""


def evaluated(*options: str, before: str = "") -> str:
    """The output of a process that searches the plugin as NCCL does, in a shell that evaluated the command's output."""
    command = f'eval "$("{sys.executable}" -m netfold.cli nccl-env {" ".join(options)})" && "{sys.executable}" -c "$0"'
    env = {name: value for name, value in os.environ.items() if name not in ("LD_LIBRARY_PATH", "NCCL_NET")}
    env |= {"LD_LIBRARY_PATH": before} if before else {}
    run = subprocess.run(["bash", "-c", command, AS_NCCL], env=env, capture_output=True, text=True, timeout=seconds(60))
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_nccl_finds_the_plugin_by_the_variables() -> None:
    assert evaluated() == "libnccl-net-netfold.so None 0"
    assert evaluated(before="/nowhere/lib") == "libnccl-net-netfold.so None 1"
    assert evaluated("--require") == "libnccl-net-netfold.so netfold 0"


def test_the_plugin_shows_nothing_but_its_tables() -> None:
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", str(shared_object())], capture_output=True, text=True, check=True
    ).stdout
    assert sorted(line.split()[-1] for line in symbols.splitlines()) == [
        f"{table}_v{version}" for table in ("ncclCollNetPlugin", "ncclNetPlugin") for version in (10, 11, 12, 8, 9)
    ]


@pytest.mark.parametrize("switch", ["", "10.0.0.9:7171#" + "a" * 64])
def test_collnet_is_on_where_there_is_a_switch(monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    monkeypatch.setenv("NETFOLD_SWITCH", switch)
    run = CliRunner().invoke(app, ["nccl-env"])
    assert run.exit_code == 0
    assert ("export NCCL_COLLNET_ENABLE=1\n" in run.stdout) == bool(switch)
    assert ("CollNet will add through the switch at 10.0.0.9:7171, " in run.stderr) == bool(switch)
    assert "a" * 64 not in run.stderr


def test_a_build_without_the_plugin_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_env, "plugin", lambda: Path("/nowhere/libnccl-net-netfold.so"))
    run = CliRunner().invoke(app, ["nccl-env"])
    assert run.exit_code != 0
    assert run.stdout == "", "nothing to evaluate"
    assert run.stderr == (
        "nccl-env: /nowhere/libnccl-net-netfold.so is absent: this build of netfold has no plugin for NCCL\n"
    )


@pytest.mark.parametrize(("installed", "is_old"), [("2.19.3", True), ("2.20.3", False), ("2.32.1", False)])
def test_an_nccl_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch, installed: str, is_old: bool) -> None:
    nccl = SimpleNamespace(metadata={"Name": "nvidia-nccl-cu12"}, version=installed)
    monkeypatch.setattr(nccl_env, "distributions", lambda: [nccl])
    run = CliRunner().invoke(app, ["nccl-env"])
    assert run.exit_code == 0
    assert (f"nvidia-nccl-cu12 {installed} is older, and will not load the plugin" in run.stderr) == is_old
