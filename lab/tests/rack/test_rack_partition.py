"""A network that is cut into halves: one half of an elastic job goes on, and the other comes back. Needs root.

Four members, each in a network namespace on one bridge. Every step's sum is checked in full.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from load import seconds, settles
from members_job import Log, command
from test_rack_cuts import Lan, lan

from netfold_lab.rack.command import why_unavailable
from netfold_lab.rack.processes import Process, stop

LACK = why_unavailable(loss=True)
pytestmark = [pytest.mark.rack, pytest.mark.skipif(LACK is not None, reason=str(LACK))]

MEMBERS = 4
TIMEOUT_S = 3.0


class Members:
    """The members' processes, and what each has printed last."""

    def __init__(self, there: Lan, folder: Path) -> None:
        self.folder = folder
        self.logs = [Log(folder / f"member{rank}") for rank in range(MEMBERS)]
        self.processes: list[Process] = []
        for rank, log in enumerate(self.logs):
            member = command(folder, rank, MEMBERS, interface=there.address(rank), timeout_s=seconds(TIMEOUT_S))
            into = f'exec "$@" >"{log.path}" 2>&1'
            self.processes.append(there.spawn(rank, "sh", "-c", into, "sh", *member))

    def last(self, rank: int) -> list[Any]:
        return self.logs[rank].last()

    def output(self) -> str:
        return Log.text(self.logs)

    def settle(self, generation: int, size: int, ranks: range) -> None:
        def holds() -> bool:
            assert all(process.poll() is None for process in self.processes), self.output()
            last = [self.last(rank) for rank in ranks]
            return all(each and each[0] >= generation and each[1] == size for each in last)

        assert settles(holds, 40.0), self.output()


def test_one_half_goes_on_and_the_other_comes_back(tmp_path: Path) -> None:
    with lan(MEMBERS) as there:
        members = Members(there, tmp_path)
        try:
            members.settle(1, 4, range(4))
            first_half = "{ 10.78.0.1, 10.78.0.2 }"
            for host in (2, 3):
                there.drop(host, f"in ip saddr {first_half}", f"out ip daddr {first_half}")
            members.settle(2, 2, range(2))
            stood = [members.last(rank) for rank in (2, 3)]
            time.sleep(seconds(5))
            assert [members.last(rank) for rank in (2, 3)] == stood  # they are half of four, and without rank 0
            for host in (2, 3):
                there.heal(host)
            members.settle(3, 4, range(4))
            (tmp_path / "stop").touch()
            for process in members.processes:
                process.wait(seconds(30))
            ends = [members.last(rank) for rank in range(4)]
        finally:
            stop(members.processes)
    done = ends[0][3]
    due = [["end", rank, MEMBERS, done, done * (done + 1) / 2] for rank in range(MEMBERS)]
    assert sorted(ends) == due, members.output()
