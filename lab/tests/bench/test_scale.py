"""bench/scale.py measures every phase of forked ranks, on one host and over several, and a P that fails is a row."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from load import seconds

from netfold_lab.rack.cleanup import racks
from netfold_lab.rack.command import why_unavailable

SCRIPT = Path(__file__).parents[3] / "lab" / "bench" / "scale.py"
LACK = why_unavailable(loss=False)
DEADLINE_S = 60
SECONDS = ("start_s", "store_s", "first_s", "small_s", "large_s", "new_group_s", "new_first_s", "end_s")


def command(folder: Path, *options: str) -> list[str]:
    written = ["--output", str(folder / "page.md"), "--data", str(folder / "data.json")]
    return [sys.executable, str(SCRIPT), "--calls", "3", "--gloo-up-to", "0", *options, *written]


def scale(folder: Path, *options: str) -> tuple[str, dict[str, Any]]:
    """The page, and what it was made from."""
    subprocess.run(command(folder, *options), check=True, capture_output=True, timeout=seconds(DEADLINE_S))
    return (folder / "page.md").read_text(), json.loads((folder / "data.json").read_text())


def in_group(leader: int) -> list[int]:
    """The processes of a session, without those that have ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session, *_ = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if int(session) == leader and state != "Z":
            found.append(int(stat.parent.name))
    return found


def test_every_phase_of_four_ranks_is_on_the_page(tmp_path: Path) -> None:
    page, data = scale(tmp_path, "--ranks", "2,4", "--hosts", "1")
    (launch,) = data["4"]["sides"]["netfold"]
    assert list(data) == ["2", "4"] and all(launch[name] > 0 for name in SECONDS)
    descriptors, private = launch["of_rank"]["descriptors"], launch["of_rank"]["private"]
    # A forked rank has its three standard streams and its orders, and nothing of other ranks.
    assert descriptors["forked"] == [4, 4] and descriptors["started"][0] > 4
    assert private["forked"][0] < private["started"][0] <= private["after"][1]
    assert page.startswith("# Many ranks\n") and "| 4 | 1 | netfold | " in page and "failed" not in page


def test_ranks_that_do_not_come_up_are_a_row_and_the_next_number_is_measured(tmp_path: Path) -> None:
    page, data = scale(tmp_path, "--ranks", "4,2", "--hosts", "1", "--deadline", "0.001")
    assert [set(data[size]["sides"]["netfold"][0]) for size in "42"] == [{"failed"}, {"failed"}]
    assert "| 4 | 1 | netfold | failed: start: rank " in page and "| 2 | 1 | netfold | failed: start: rank " in page


@pytest.mark.rack
@pytest.mark.skipif(LACK is not None, reason=str(LACK))
def test_ranks_are_divided_between_emulated_hosts(tmp_path: Path) -> None:
    before = racks()
    page, data = scale(tmp_path, "--ranks", "6", "--per-host", "3")
    (launch,) = data["6"]["sides"]["netfold"]
    assert data["6"]["hosts"] == 2 and all(launch[name] > 0 for name in SECONDS)
    assert "| 6 | 2 | netfold | " in page and racks() == before


@pytest.mark.rack
@pytest.mark.skipif(LACK is not None, reason=str(LACK))
def test_an_interrupted_run_leaves_neither_processes_nor_namespaces(tmp_path: Path) -> None:
    before = racks()
    options = ("--ranks", "6", "--per-host", "3", "--calls", "1000000")
    with subprocess.Popen(
        command(tmp_path, *options), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as bench:
        forked = Path(f"/proc/{bench.pid}/task/{bench.pid}/children")
        until = time.monotonic() + seconds(DEADLINE_S)
        hosts: list[int] = []
        # Until both hosts, beside the reaper, have forked their ranks, whose calls never end.
        while sum(len(in_group(host)) > 3 for host in hosts) < 2:
            assert time.monotonic() < until and bench.poll() is None
            time.sleep(0.1)
            hosts = [int(pid) for pid in forked.read_text().split()]
        os.kill(bench.pid, signal.SIGTERM)
        assert bench.wait(seconds(30)) == 128 + signal.SIGTERM
    assert not [pid for host in hosts for pid in in_group(host)] and racks() == before
