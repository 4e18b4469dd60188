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


def evaluated(*options: str, before: str = "", program: str = AS_NCCL) -> str:
    """The output of a process that searches the plugin as NCCL does, in a shell that evaluated the command's output."""
    command = f'eval "$("{sys.executable}" -m netfold.cli nccl-env {" ".join(options)})" && "{sys.executable}" -c "$0"'
    env = {name: value for name, value in os.environ.items() if name not in ("LD_LIBRARY_PATH", "NCCL_NET")}
    env |= {"LD_LIBRARY_PATH": before} if before else {}
    run = subprocess.run(["bash", "-c", command, program], env=env, capture_output=True, text=True, timeout=seconds(60))
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
    ] + [f"ncclProfiler_v{version}" for version in (4, 5, 6)]


@pytest.mark.parametrize("switch", ["", "10.0.0.9:7171#" + "a" * 64])
def test_collnet_is_on_where_there_is_a_switch(monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    monkeypatch.setenv("NETFOLD_SWITCH", switch)
    run = CliRunner().invoke(app, ["nccl-env"])
    assert run.exit_code == 0
    assert ("export NCCL_COLLNET_ENABLE=1\n" in run.stdout) == bool(switch)
    assert ("CollNet will add through the switch at 10.0.0.9:7171, " in run.stderr) == bool(switch)
    assert "a" * 64 not in run.stderr
    assert "REQUIRE_SWITCH" not in run.stdout
    run = CliRunner().invoke(app, ["nccl-env", "--require"])
    assert ("export NETFOLD_NCCL_REQUIRE_SWITCH=1\n" in run.stdout) == bool(switch)
    assert ("where that refuses a rank, NCCL stops." in run.stderr) == bool(switch)


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
    sentence = f"nvidia-nccl-cu12 {installed} is older than 2.20.3, and will not load the plugin"
    assert (sentence in run.stderr) == is_old


@pytest.mark.parametrize(
    ("installed", "refused"), [("2.26.5", ["the profiler"]), ("2.27.3", []), ("2.21.5", ["the profiler", "the tuner"])]
)
def test_an_nccl_without_profiler_or_tuner_is_named(
    monkeypatch: pytest.MonkeyPatch, installed: str, refused: list[str]
) -> None:
    nccl = SimpleNamespace(metadata={"Name": "nvidia-nccl-cu12"}, version=installed)
    monkeypatch.setattr(nccl_env, "distributions", lambda: [nccl])
    run = CliRunner().invoke(app, ["nccl-env", "--profile", "a run", "--tune", "table"])
    assert run.exit_code == 0
    for what in ("the plugin", "the profiler", "the tuner"):
        assert (f"will not load {what}" in run.stderr) == (what in refused)


def test_nccl_finds_profiler_and_tuner_by_the_variables() -> None:
    """In a shell that evaluated the output, in a folder with a blank."""
    search = """
import ctypes, os
ctypes.CDLL(os.environ["NCCL_PROFILER_PLUGIN"]).ncclProfiler_v6
ctypes.CDLL(os.environ["NCCL_TUNER_PLUGIN"]).ncclTunerPlugin_v6
print(os.environ["NETFOLD_PROFILE"], os.environ["NETFOLD_NCCL_TUNER"])
"""
    said = evaluated("--profile '/tmp/a run'", "--tune /tmp/table", program=search)
    assert said == "/tmp/a run /tmp/table"


def test_the_tuner_is_asked_for_by_name() -> None:
    """NCCL takes a tuner in the network plugin's object without being asked."""
    network, tuner = (
        subprocess.run(["nm", "-D", "--defined-only", str(each)], capture_output=True, text=True, check=True).stdout
        for each in (shared_object(), shared_object().parent / nccl_env.TUNER)
    )
    assert "Tuner" not in network
    assert sorted(line.split()[-1] for line in tuner.splitlines()) == [
        f"ncclTunerPlugin_v{version}" for version in (3, 4, 5, 6)
    ]
