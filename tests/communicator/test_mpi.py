"""Ranks under real mpiruns, from wheels (`make bench-peers`): start-up, and collectives over their MPI."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from fabrics import need_mpi
from load import seconds
from ranks import run_ranks, run_threads

from netfold import Communicator, FileStore, Options
from netfold.bench.mpi_peers import have_peer, launch_mpi

MPIS = ("openmpi", "mpich", "intel")
SCRIPT = Path(__file__).with_name("mpi_ranks.py")
DEADLINE_S = 90


def start(
    mpi: str, ranks: int, *case: str, script: Path = SCRIPT, within: tuple[str, ...] = ()
) -> subprocess.Popen[str]:
    """within: the command that starts each rank."""
    need_mpi(mpi)
    launch = launch_mpi(mpi, ranks, [*within, sys.executable, str(script), *case])
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
        env=kept | launch.environment | {"PYTHONPATH": f"{SCRIPT.parent}{os.pathsep}{SCRIPT.parent.parent}"},
        start_new_session=True,
    )


def end(process: subprocess.Popen[str]) -> list[Any]:
    """The result of each rank, in any order."""
    try:
        said, errors = process.communicate(timeout=seconds(DEADLINE_S))
    except subprocess.TimeoutExpired:
        kill(process)
        raise
    assert process.returncode == 0, errors
    # Two ranks' lines may be merged.
    decoder, found, rest = json.JSONDecoder(), [], said.strip()
    while rest:
        value, length = decoder.raw_decode(rest)
        found.append(value)
        rest = rest[length:].strip()
    return found


def kill(process: subprocess.Popen[str]) -> None:
    """End the launcher and its ranks, which have sessions of their own."""
    ranks = psutil.Process(process.pid).children(recursive=True)
    for each in [*ranks, process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.communicate()


def run(mpi: str, ranks: int, *case: str) -> list[Any]:
    return end(start(mpi, ranks, *case))


@pytest.mark.parametrize("mpi", MPIS)
def test_two_mpiruns_at_once_form_separate_groups_with_no_variables_set(mpi: str) -> None:
    three, two = start(mpi, 3, "meet"), start(mpi, 2, "meet")
    assert end(three) == [[0, 1, 2]] * 3
    assert end(two) == [[0, 1]] * 2


@pytest.mark.torch
def test_a_script_that_only_names_netfold_trains_under_mpirun(tmp_path: Path) -> None:
    mpi = next((each for each in MPIS if have_peer(each)), MPIS[0])
    process = start(mpi, 2, str(tmp_path), script=SCRIPT.parents[1] / "torch" / "plain_script.py")
    try:
        _, errors = process.communicate(timeout=seconds(DEADLINE_S))
    except subprocess.TimeoutExpired:
        kill(process)
        raise
    assert process.returncode == 0, errors
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [each["ranks 0"] for each in found] == [[0, 1]] * 2


@pytest.mark.parametrize("mpi", MPIS)
def test_every_algorithm_is_correct_over_each_mpi(mpi: str) -> None:
    found = run(mpi, 3, "algorithms")
    assert len(found) == 3 and all(each["segments"] > 1000 for each in found), found
    assert all({"openmpi": "Open MPI", "mpich": "MPICH", "intel": "Intel"}[mpi] in each["version"] for each in found)


@pytest.mark.parametrize("mpi", MPIS)
def test_the_program_may_call_mpi_beside_netfold_and_split_groups(mpi: str) -> None:
    assert run(mpi, 4, "beside") == [4] * 4


@pytest.mark.parametrize("mpi", MPIS)
def test_a_sent_message_arrives_while_its_sender_makes_no_call(mpi: str) -> None:
    assert max(run(mpi, 2, "goes_away")) < 0.4


# mpirun ends all ranks when one dies. With a shell in between it does not notice.
HIDES_DEATH = ("sh", "-c", '"$@" || sleep 60', "sh")


@pytest.mark.parametrize("mpi", MPIS)
def test_a_dead_rank_is_named_in_time(mpi: str, tmp_path: Path) -> None:
    process = start(mpi, 3, "dies", str(tmp_path), within=HIDES_DEATH)
    files = [tmp_path / f"{rank}.json" for rank in (0, 2)]
    try:
        deadline = time.monotonic() + seconds(DEADLINE_S)
        while not all(file.exists() for file in files) and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        kill(process)
    for file in files:
        told = json.loads(file.read_text())
        assert told["type"] == "PeerLost" and "rank 1" in told["error"], told
        assert told["took_s"] < seconds(5), told


def test_an_mpi_for_one_thread_at_a_time_is_refused_with_the_reason() -> None:
    for said in run("openmpi", 2, "too_low"):
        assert "was begun with MPI_THREAD_SERIALIZED" in said and "mpi4py.rc.thread_level" in said, said


def alone(rank: int, size: int, folder: str) -> None:
    os.environ["MPI4PY_LIBMPI"] = "/nowhere/libmpi.so"
    Communicator(FileStore(folder), rank, size, options=Options(transport="mpi"), join_timeout_s=10)


def test_without_an_mpi_the_group_is_refused_and_no_other_transport_used() -> None:
    for outcome in run_ranks(alone, 2):
        assert outcome.error == "RendezvousError", outcome
        assert "cannot go over MPI (NETFOLD_TRANSPORT): it takes mpi4py, and an MPI beside it" in outcome.text


def differs(rank: int, size: int, folder: str) -> None:
    transport = "mpi" if rank == 1 else "tcp"
    Communicator(FileStore(folder), rank, size, options=Options(transport=transport), join_timeout_s=20)


def test_ranks_that_do_not_all_use_mpi_are_refused() -> None:
    said = [outcome.text for outcome in run_threads(differs, 2, timeout_s=10)]
    assert "rank 1 is to go over MPI, rank 0 over TCP: every rank needs the same (NETFOLD_TRANSPORT)" in said[0]
    assert "rank 0 is to go over TCP, rank 1 over MPI: every rank needs the same (NETFOLD_TRANSPORT)" in said[1]
