"""The examples, started by their documented commands. Each compares itself with training in one process."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from load import seconds

ROOT = Path(__file__).parents[3]


def run(ranks: int, script: str) -> str:
    command = [sys.executable, "examples/launch.py", str(ranks), f"examples/{script}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds(90))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("ranks", [3])
def test_numpy_training_finds_the_parameters_of_a_single_process(ranks: int) -> None:
    assert re.match(rf"{ranks} ranks: loss .* from a single process", run(ranks, "numpy_mlp.py"))


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed (pip install jax)")
@pytest.mark.parametrize("ranks", [2])
def test_jax_training_finds_the_parameters_of_a_single_process(ranks: int) -> None:
    assert re.match(rf"{ranks} ranks: loss .* from a single process", run(ranks, "jax_mlp.py"))


@pytest.mark.torch
def test_a_horovod_script_for_torch_learns() -> None:
    assert re.match(r"2 ranks: [89]\d\.\d% of digits", run(2, "horovod_torch_mnist.py"))


@pytest.mark.torch
def test_torchrun_starts_a_horovod_job_beside_its_own_store() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "examples/numpy_mlp.py"], cwd=ROOT, capture_output=True, text=True, timeout=seconds(90)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks: loss" in done.stdout
