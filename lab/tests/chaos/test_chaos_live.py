"""Short schedules on real processes, and one with planted defects. Needs root and network namespaces."""

from __future__ import annotations

import os
import time
from pathlib import Path

import arena
import places
import planted
import pytest
from schedule import SHAPES, Fault, Schedule
from verdict import problems

from netfold_lab.rack import Rack, names
from netfold_lab.rack.command import why_unavailable

LACK = why_unavailable(loss=True, delay=True)
pytestmark = [pytest.mark.rack, pytest.mark.skipif(LACK is not None, reason=str(LACK))]

SECONDS = 8.0
# Each kind of fault once, so that every part of the harness runs.
SHORT = {
    "a switch that dies, in a tree, with tokens": Schedule(
        1,
        SECONDS,
        SHAPES[2],
        True,
        (
            Fault("wrong token", ("switch", 0), 0.2, 1.0),
            Fault("copies", ("switch", 1), 0.4, 1.0),
            Fault("kill switch", ("switch", 1), 2.0, 1.0),
            Fault("garbage", ("switch", 1), 2.3, 2.5, "udp"),
            Fault("clock jumps", ("rank", 0), 2.5, 2.0, amount=1e5),
            Fault("few descriptors", ("rank", 2), 5.0, 1.0, amount=2),
            Fault("duplicate and reorder", ("host", 0), 5.5, 2.0, amount=0.1),
        ),
        2,
    ),
    "cuts and hostile packets, side by side": Schedule(
        2,
        SECONDS,
        SHAPES[3],
        False,
        (
            Fault("ICMP", ("host", 1), 0.1, 1.0, "fragmentation needed"),
            Fault("garbage", ("switch", 0), 0.2, 1.0, "udp"),
            Fault("garbage", ("switch", 1), 0.3, 1.0, "tcp"),
            Fault("lose", ("host", 2), 0.5, 2.0, amount=0.02),
            Fault("cut switch", ("switch", 0), 1.0, 4.0, "udp, in"),
            Fault("shrink MTU", ("switch", 1), 5.0, 1.0, amount=1300),
            Fault("slow rank", ("rank", 1), 5.5, 1.0, amount=0.5),
        ),
        None,
    ),
    "two ranks per host": Schedule(
        3,
        SECONDS,
        SHAPES[1],
        False,
        (
            Fault("full /dev/shm", ("host", 0), 0.5, 3.0),
            Fault("stop switch", ("switch", 0), 1.0, 4.0),
            Fault("stop rank", ("rank", 3), 1.5, 0.5),
            Fault("cut host", ("host", 1), 6.0, 0.5, "udp and tcp, both ways"),
        ),
        None,
    ),
}


@pytest.fixture(scope="module", autouse=True)
def warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    places.warm_up(tmp_path_factory.mktemp("clock"))


@pytest.mark.parametrize("name", SHORT)
def test_a_short_schedule_costs_no_step_and_no_sum(name: str, tmp_path: Path) -> None:
    schedule = SHORT[name]
    record = arena.run(schedule, tmp_path)
    assert problems(schedule, record) == []
    # The faults did reach the job.
    assert record.fallbacks >= 1


def test_processes_of_one_host_share_a_dev_shm_and_have_clocks_of_their_own(tmp_path: Path) -> None:
    with Rack(2, "1gbit") as rack:
        hosts = [places.Place(names.host_namespace(rack.rack_id, host), tmp_path, f"host{host}") for host in range(2)]
        of_host = (hosts[0], hosts[0], hosts[1])
        environment = {"PATH": os.environ["PATH"]}
        asked = [
            place.fork(f"process{number}", planted.look, str(tmp_path / f"ask{number}"), env=environment)
            for number, place in enumerate(of_host)
        ]
        began = time.time()
        asked[1].set_clock(-100_000)
        (Path(f"/proc/{asked[0].pid}/root/dev/shm") / "chaos").write_bytes(bytes(1 << 20))
        for number, process in enumerate(asked):
            (tmp_path / f"ask{number}").touch()
            process.join(60)
        said = [process.log().split() for process in asked]
    offsets = [round((float(clock) - began) / 100_000) for clock, _, _ in said]
    assert offsets == [0, -1, 0]
    assert all(abs(float(monotonic) - time.monotonic()) < 1000 for _, monotonic, _ in said)
    assert [files for _, _, files in said] == ["['chaos']", "['chaos']", "[]"]


def test_a_wrong_sum_a_hang_and_a_lost_step_are_found_in_a_real_job(tmp_path: Path) -> None:
    schedule = Schedule(4, SECONDS, SHAPES[0], False, (), None)
    found = problems(schedule, arena.run(schedule, tmp_path, run_rank=planted.run_rank))
    step = planted.WRONG_CALL // 2
    for rank in range(3):
        assert any(problem.startswith(f"wrong sum: rank {rank}, step {step}: 1 elements") for problem in found), found
    assert any(problem.startswith(f"hang: rank 0, step {planted.HANGS_CALL // 2 - 1} took") for problem in found), found
    assert any(problem.startswith("lost step: rank 1 failed") and "planted" in problem for problem in found), found
