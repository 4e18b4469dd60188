"""A host that sends nothing more is lost within the time that the pages promise, elastic or not. Needs root.

Each rank is on a host of its own, a network namespace. A host goes silent: every packet to and from it is dropped.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lan import Lan, lan
from load import seconds
from members_job import Log, command

from netfold_lab.rack.command import why_unavailable
from netfold_lab.rack.processes import Process, stop

LACK = why_unavailable(loss=False)
pytestmark = [pytest.mark.rack, pytest.mark.skipif(LACK is not None, reason=str(LACK))]

# docs/explanation/elastic.md
SILENT_HOST_S, STOPPED_PROCESS_S = 10.0, 17.0
# docs/explanation/limits.md, by default
PEER_LOST_S = 30.0
EVERYTHING = ("in meta l4proto { tcp, udp, icmp }", "out meta l4proto { tcp, udp, icmp }")


class Members:
    """Three members of an elastic job, each on its host."""

    def __init__(self, there: Lan, folder: Path) -> None:
        self.lan, self.folder = there, folder
        self.logs = [Log(folder / f"member{number}") for number in range(3)]
        self.processes = [self._start(number) for number in range(3)]

    def _start(self, number: int) -> Process:
        words = command(self.folder, number, 3, interface="eth0", timeout_s=1800)
        # Shared memory is of one host only.
        shell = f'exec "$@" >"{self.logs[number].path}" 2>&1'
        return self.lan.spawn(number, "sh", "-c", shell, "sh", *words, NETFOLD_TRANSPORT="tcp")

    def wait_for_size(self, size: int, of: list[int], timeout_s: float) -> float:
        """Wait until these members' steps are those of a generation of this size; return the seconds."""
        began = time.monotonic()
        while not all((last := self.logs[each].last()) and last[1] == size for each in of):
            assert all(self.processes[each].poll() is None for each in of), Log.text(self.logs)
            assert time.monotonic() - began < seconds(timeout_s), Log.text(self.logs)
            time.sleep(0.05)
        return time.monotonic() - began

    def end(self) -> list[list[Any]]:
        (self.folder / "stop").touch()
        for process in self.processes:
            process.wait(seconds(30))
        return [log.last() for log in self.logs]


@contextlib.contextmanager
def elastic_job(folder: Path) -> Iterator[Members]:
    with lan(3) as there:
        members = Members(there, folder)
        try:
            members.wait_for_size(3, [0, 1, 2], 30)
            yield members
        finally:
            stop(members.processes)


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("what", ["a silent host", "a stopped process"])
def test_a_member_that_sends_nothing_more_is_decided_out_in_time_and_comes_back(
    what: str, victim: int, tmp_path: Path
) -> None:
    left = [each for each in range(3) if each != victim]
    with elastic_job(tmp_path) as members:
        process = members.processes[victim]
        if what == "a silent host":
            members.lan.drop(victim, *EVERYTHING)
            members.wait_for_size(2, left, SILENT_HOST_S)
            members.lan.heal(victim)
        else:
            os.kill(process.pid, signal.SIGSTOP)
            members.wait_for_size(2, left, STOPPED_PROCESS_S)
            os.kill(process.pid, signal.SIGCONT)
        members.wait_for_size(3, [0, 1, 2], 60)
        ends = members.end()
        assert {words[0] for words in ends} == {"end"}, Log.text(members.logs)
        done = ends[0][3]
        assert [words[3:] for words in ends] == [[done, done * (done + 1) / 2]] * 3


RANK = """
import os, sys, time
import numpy as np
from netfold import Communicator
from netfold.errors import PeerLost
with Communicator.from_environment(timeout_s=600, join_timeout_s=20) as group:
    values = np.ones(int(sys.argv[1]), np.float32)
    group.all_reduce(values)
    print("under way", flush=True)
    try:
        values[:] = 1
        while values[0] == 1:
            if group.rank == 0 and os.path.exists(sys.argv[3]):
                values[:] = 0
            if sys.argv[2] == "receive":
                group.broadcast(values, root=1)
            elif sys.argv[2] == "send":
                group.broadcast(values, root=0)
            else:
                group.all_reduce(values, op="min")
                time.sleep(0.01)
    except PeerLost as error:
        print(f"lost {error.rank}: {error}", flush=True)
"""


@contextlib.contextmanager
def two_ranks(folder: Path, elements: int, verb: str) -> Iterator[tuple[Lan, list[Path], list[Process]]]:
    with lan(2) as there:
        logs = [folder / f"rank{rank}" for rank in range(2)]
        ranks = [
            there.spawn(
                rank, "sh", "-c", f'exec "$@" >"{logs[rank]}" 2>&1', "sh", sys.executable, "-c", RANK, str(elements),
                verb, str(folder / "stop"), RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR=there.address(0),
                MASTER_PORT="29700",
                NETFOLD_TRANSPORT="tcp", NETFOLD_PROBE="off",
            )
            for rank in range(2)
        ]  # fmt: skip
        try:
            wait_for(logs, "under way", 30)
            time.sleep(0.5)
            yield there, logs, ranks
        finally:
            stop(ranks)


@pytest.mark.parametrize("elements", [1, 4_000_000])
@pytest.mark.parametrize("verb", ["receive", "send", "both"])
def test_every_other_rank_learns_in_time_that_a_host_is_silent(verb: str, elements: int, tmp_path: Path) -> None:
    with two_ranks(tmp_path, elements, verb) as (there, logs, _):
        there.drop(1, *EVERYTHING)
        wait_for(logs[:1], r"lost 1: .*rank 1", PEER_LOST_S)


def test_a_stopped_process_whose_host_answers_is_not_lost(tmp_path: Path) -> None:
    """Also where its receive buffer is full: its kernel confirms the probes of that."""
    with two_ranks(tmp_path, 4_000_000, "send") as (_, logs, ranks):
        os.kill(ranks[1].pid, signal.SIGSTOP)
        time.sleep(PEER_LOST_S + 5)  # nothing happens in this time: there is no event to wait for
        os.kill(ranks[1].pid, signal.SIGCONT)
        (tmp_path / "stop").touch()
        for rank, log in zip(ranks, logs, strict=True):
            assert rank.wait(seconds(30)) == 0 and "lost" not in log.read_text(), log.read_text()


def wait_for(logs: list[Path], pattern: str, timeout_s: float) -> None:
    until = time.monotonic() + seconds(timeout_s)
    while not all(log.exists() and re.search(pattern, log.read_text()) for log in logs):
        assert time.monotonic() < until, [log.read_text() for log in logs if log.exists()]
        time.sleep(0.05)
