"""Ranks that the mpirun of each MPI started (wheels, `make bench-peers`)."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from fabrics import need_mpi
from load import seconds
from sources import HELPERS

from netfold_lab.bench.mpi_peers import have_peer, launch_mpi

MPIS = ("openmpi", "mpich", "intel")
SCRIPT = Path(__file__).with_name("mpi_ranks.py")
DEADLINE_S = 90


def start(mpi: str, ranks: int, *arguments: str, script: Path = SCRIPT) -> subprocess.Popen[str]:
    need_mpi(mpi)
    launch = launch_mpi(mpi, ranks, [sys.executable, str(script), *arguments])
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("NETFOLD_", "MASTER_", "SLURM_", "OMPI_", "PMI")) and name not in ("RANK", "WORLD_SIZE")
    }
    return subprocess.Popen(
        launch.argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=kept | launch.environment | {"PYTHONPATH": f"{SCRIPT.parent}{os.pathsep}{HELPERS}"},
        start_new_session=True,
    )


def output(process: subprocess.Popen[str]) -> str:
    """Return the output of a launcher that succeeded. After DEADLINE_S, kill the launcher and its ranks."""
    try:
        printed, errors = process.communicate(timeout=seconds(DEADLINE_S))
    except subprocess.TimeoutExpired:
        ranks = psutil.Process(process.pid).children(recursive=True)  # they have sessions of their own
        for each in [*ranks, process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.communicate()
        raise
    assert process.returncode == 0, errors
    return printed


def results(process: subprocess.Popen[str]) -> list[Any]:
    """The result of each rank, in any order."""
    # Two ranks' lines may be merged.
    decoder, found, rest = json.JSONDecoder(), [], output(process).strip()
    while rest:
        value, length = decoder.raw_decode(rest)
        found.append(value)
        rest = rest[length:].strip()
    return found


@pytest.mark.parametrize("mpi", MPIS)
def test_two_mpiruns_at_once_form_separate_groups_with_no_variables_set(mpi: str) -> None:
    three, two = start(mpi, 3), start(mpi, 2)
    assert results(three) == [[0, 1, 2]] * 3
    assert results(two) == [[0, 1]] * 2


@pytest.mark.torch
def test_a_script_that_only_names_netfold_trains_under_mpirun(tmp_path: Path) -> None:
    mpi = next((each for each in MPIS if have_peer(each)), MPIS[0])
    output(start(mpi, 2, str(tmp_path), script=SCRIPT.parents[1] / "torch" / "plain_script.py"))
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [each["ranks 0"] for each in found] == [[0, 1]] * 2
