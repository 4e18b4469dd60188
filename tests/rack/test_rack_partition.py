"""A network that is cut into halves: one half of an elastic job goes on, and the other comes back. Needs root.

Four members, each in a network namespace on one bridge. Every step's sum is checked in full.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from load import seconds, settles
from test_rack_cuts import Lan, lan

from netfold.rack.command import why_unavailable
from netfold.rack.processes import Process, stop

LACK = why_unavailable(loss=True)
pytestmark = [pytest.mark.rack, pytest.mark.skipif(LACK is not None, reason=str(LACK))]

MEMBERS = 4
TIMEOUT_S = 3.0
TESTS = Path(__file__).parents[1]

MEMBER = """
import json, os, sys, time
from members_job import Job, first_members
from netfold import Options
folder, rank = sys.argv[1], int(sys.argv[2])
options = Options(probe="off", interface=sys.argv[3])
with first_members(folder, rank, 4, options, timeout_s=float(sys.argv[4])) as members:
    def until(members):
        time.sleep(0.01)
        return os.path.exists(f"{folder}/stop")
    job = Job(members, until)
    job.before_vote = lambda: print(json.dumps([members.generation, members.size, members.done]), flush=True)
    job.run()
    print(json.dumps(["end", members.rank, members.done, float(job.state[0])]), flush=True)
"""


class Members:
    """The members' processes, and what each has printed last."""

    def __init__(self, there: Lan, folder: Path) -> None:
        self.folder = folder
        self.logs = [folder / f"member{rank}" for rank in range(MEMBERS)]
        self.processes: list[Process] = []
        for rank, log in enumerate(self.logs):
            command = f'exec "$0" -c "$1" "$2" "$3" "$4" "$5" >"{log}" 2>&1'
            arguments = (sys.executable, MEMBER, str(folder), str(rank), there.address(rank), str(seconds(TIMEOUT_S)))
            self.processes.append(there.spawn(rank, "sh", "-c", command, *arguments, PYTHONPATH=str(TESTS)))

    def last(self, rank: int) -> list[object]:
        lines = self.logs[rank].read_text().splitlines() if self.logs[rank].exists() else []
        return json.loads(lines[-1]) if lines and lines[-1].startswith("[") else []

    def output(self) -> str:
        return "\n".join(f"{log.name}: {log.read_text()[-3000:]}" for log in self.logs if log.exists())

    def settle(self, generation: int, size: int, ranks: range) -> None:
        def holds() -> bool:
            assert all(process.poll() is None for process in self.processes), self.output()
            last = [self.last(rank) for rank in ranks]
            return all(each and each[0] >= generation and each[1] == size for each in last)  # type: ignore[operator]

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
    assert sorted(end[1] for end in ends) == [0, 1, 2, 3], members.output()  # type: ignore[type-var]
    done = ends[0][2]
    assert isinstance(done, int)
    assert [end[2:] for end in ends] == [[done, done * (done + 1) / 2]] * 4
