"""A switch whose link changes, or differs between directions, slows a job little. Needs root.

Four hosts at 200 Mbit/s reduce 4 MB by `auto` and by a ring in turns; every sum is checked in full. A ring takes
0.27 s.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from load import seconds

from netfold_lab.rack import Rack
from netfold_lab.rack.aggregator import aggregator_argv, start_aggregator
from netfold_lab.rack.command import run, why_unavailable
from netfold_lab.rack.link import parse_link, shape_command
from netfold_lab.rack.names import HOST_INTERFACE, SWITCH_PORT, aggregator_namespace, host_address, switch_namespace
from netfold_lab.rack.processes import Process

LACK = why_unavailable(loss=True)
pytestmark = [pytest.mark.rack, pytest.mark.skipif(LACK is not None, reason=str(LACK))]

HOSTS = 4
# Consecutive turns that a change is judged by, and the most turns before them. Any eight turns hold one trial.
JUDGED, SETTLES = 9, 24

RANK = """
import json, logging, os, sys, time
import numpy as np
from netfold import Communicator, FileStore, Options
logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
folder, rank, size = sys.argv[1], int(os.environ["RANK"]), int(sys.argv[2])
def join(side, **how):
    os.makedirs(f"{folder}/{side}", exist_ok=True)
    options = Options(interface="eth0", **how)
    return Communicator(FileStore(f"{folder}/{side}"), rank, size, options=options, timeout_s=60, join_timeout_s=30)
pattern = np.arange(1 << 20) % 16
tensor = np.empty(1 << 20, np.float32)
ring = join("ring", switch="", algorithm="ring")
began = time.perf_counter()
auto = join("auto")
made_s = time.perf_counter() - began
groups, turn, stop = {"auto": auto, "ring": ring}, 0, np.zeros(1)
while not stop[0]:
    took = np.zeros(2)
    for place, side in enumerate(groups):
        np.copyto(tensor, pattern * (rank + 1))
        ring.barrier()
        began = time.perf_counter()
        groups[side].all_reduce(tensor)
        took[place] = time.perf_counter() - began
        assert (tensor == pattern * (size * (size + 1) / 2)).all(), (turn, side)
    ring.all_reduce(took, op="max")
    stop[0] = os.path.exists(f"{folder}/stop")
    ring.broadcast(stop)
    found, turn = auto.group.shares, turn + 1
    if rank == 0:
        result = {"took": took.tolist(), "parts": [part / 4096 for part in found.balanced], "made_s": made_s}
        result["switches"] = auto.group.links.switches
        result["row"] = auto.group.table.choose("all_reduce", 4 << 20).algorithm
        print(json.dumps(result), flush=True)
ring.barrier()
"""


class Job:
    """The ranks of a rack's first hosts."""

    def __init__(self, rack: Rack, folder: Path, switch: str, **environment: str) -> None:
        self.folder = folder
        self.logs = [folder / f"rank{rank}" for rank in range(HOSTS)]
        (folder / "script.py").write_text(RANK)
        self.ranks = []
        for rank, log in enumerate(self.logs):
            command = f'exec "$0" "$1" "$2" "$3" >"{log}" 2>"{log}.log"'
            argv = ["sh", "-c", command, sys.executable, str(folder / "script.py"), str(folder), str(HOSTS)]
            self.ranks.append(rack.popen(rank, argv, {"NETFOLD_SWITCH": switch, **environment}))

    def turns(self) -> list[Any]:
        lines = self.logs[0].read_text().splitlines() if self.logs[0].exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def log(self) -> str:
        return Path(f"{self.logs[0]}.log").read_text()

    def wait_for(self, count: int) -> list[Any]:
        """Until there are so many turns more than now; these."""
        before, deadline = len(self.turns()), time.monotonic() + seconds(10 + 2.5 * count)
        while len(self.turns()) < before + count:
            for rank, process in enumerate(self.ranks):
                assert process.poll() is None, Path(f"{self.logs[rank]}.log").read_text()
            assert time.monotonic() < deadline, (self.turns()[-3:], self.log())
            time.sleep(0.05)
        return self.turns()[before:]

    def end(self) -> None:
        (self.folder / "stop").touch()
        for rank, process in enumerate(self.ranks):
            process.wait(seconds(30))
            assert process.returncode == 0, Path(f"{self.logs[rank]}.log").read_text()


def over_ring(turns: list[Any]) -> float:
    """The time by `auto` divided by a ring's, in consecutive turns."""
    return statistics.median(turn["took"][0] / turn["took"][1] for turn in turns)


@contextlib.contextmanager
def standing(switch_rate: str, hosts: int = HOSTS, loss: str = "0%") -> Iterator[tuple[Rack, Process]]:
    with Rack(hosts, "200mbit", loss, switch_rate=switch_rate) as rack:
        yield rack, rack.start_switch(lambda line: None)


def reshape(rack: Rack, rate: str, *, to_switch: bool = True, from_switch: bool = True) -> None:
    """Change the rate of the switch's link, in one direction or both."""
    ends = [(switch_namespace(rack.rack_id), "aggregator")] * to_switch
    ends += [(aggregator_namespace(rack.rack_id), HOST_INTERFACE)] * from_switch
    for namespace, device in ends:
        command = shape_command(namespace, device, parse_link(rate))
        run([{"add": "change"}.get(word, word) for word in command])


def address(rack: Rack) -> str:
    assert rack.switch_address is not None
    return rack.switch_address


@pytest.mark.parametrize("ways", [{"to_switch": False}, {"from_switch": False}], ids=["from", "to"])
def test_the_slower_direction_is_the_switchs_rate(ways: dict[str, bool], tmp_path: Path) -> None:
    with standing("400mbit") as (rack, _):
        reshape(rack, "50mbit", **ways)
        job = Job(rack, tmp_path, address(rack))
        job.wait_for(SETTLES)
        turns = job.wait_for(JUDGED)
        job.end()
    ratio = over_ring(turns)
    print(f"one direction slower: {ratio:.3f} of a ring, {turns[-1]}")
    assert ratio < 1.15, turns
    assert turns[-1]["switches"][0] < 5e6, "400 Mbit/s for four would be 11.8 MB/s"


def test_losses_during_a_measurement_do_not_slow_the_job(tmp_path: Path) -> None:
    with standing("400mbit", loss="1%") as (rack, _):
        job = Job(rack, tmp_path, address(rack))
        turns = job.wait_for(SETTLES)[-JUDGED:]
        job.end()
    (rate,) = turns[0]["switches"]
    print(
        f"1% lost: {rate / 1e6:.3g} MB/s of 11.75, made in {turns[0]['made_s']:.2f} s, {over_ring(turns):.3f} of a ring"
    )
    assert 0 < rate < 14e6 and turns[0]["made_s"] < seconds(12)
    assert over_ring(turns) < 1.15


@pytest.mark.parametrize(("before", "after"), [("800mbit", "100mbit"), ("400mbit", "20mbit"), ("200mbit", "10mbit")])
def test_a_link_that_slows_down_during_a_job_costs_a_few_operations(before: str, after: str, tmp_path: Path) -> None:
    with standing(before) as (rack, _):
        job = Job(rack, tmp_path, address(rack))
        first = job.wait_for(SETTLES)
        reshape(rack, after)
        change = job.wait_for(SETTLES)
        turns = job.wait_for(JUDGED)
        job.end()
        log = job.log()
    slow = sum(turn["took"][0] > 1.15 * turn["took"][1] for turn in change)
    ratio = over_ring(turns)
    earlier = over_ring(first[-JUDGED:])
    print(f"{before} to {after}: {earlier:.3f} before, {slow} slow turns, then {ratio:.3f} of a ring")
    assert ratio < 1.15, (change, turns)
    assert "rates of a large all_reduce drifted" in log, "one line per minute, which may be of an earlier change"


ENDS: dict[str, Callable[[Rack, Process], None]] = {
    "stopped": lambda _, switch: os.kill(switch.pid, signal.SIGSTOP),
    "killed": lambda _, switch: switch.kill(),
    "UDP cut": lambda rack, _: run(
        ["ip", "netns", "exec", aggregator_namespace(rack.rack_id), "nft", "-f", "-"],
        stdin="table inet cut { chain c { type filter hook input priority 0; meta l4proto udp drop;\n}\n}\n",
    ),
}


@pytest.mark.parametrize("what", ENDS)
def test_a_switch_that_ends_during_its_measurement(what: str, tmp_path: Path) -> None:
    """The first size is more than what such a link lets through at once, and takes seconds."""
    with standing("64kbit") as (rack, switch):
        job = Job(rack, tmp_path, address(rack), NETFOLD_REJOIN_S="0", NETFOLD_LOG="debug")
        deadline = time.monotonic() + seconds(30)
        while "joined the switch" not in (job.log() if Path(f"{job.logs[0]}.log").exists() else ""):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.2)
        ENDS[what](rack, switch)
        turns = job.wait_for(5)
        job.end()
        log = job.log()
        if what == "stopped":
            os.kill(switch.pid, signal.SIGCONT)
    print(f"{what}: the group was made in {turns[0]['made_s']:.2f} s, {over_ring(turns):.3f} of a ring")
    assert turns[0]["switches"] == [] and turns[0]["made_s"] < seconds(12)
    assert re.search("was not measured: .*is gone", log), log
    assert over_ring(turns) < 1.3


def test_two_switches_with_different_links_get_their_parts_within_16_operations(tmp_path: Path) -> None:
    with standing("400mbit", hosts=HOSTS + 1) as (rack, _):
        spare = f"{host_address(HOSTS)}:{SWITCH_PORT}"
        start_aggregator(partial(rack.popen, HOSTS), aggregator_argv(spare), lambda line: None)
        job = Job(rack, tmp_path, f"{address(rack)},{spare}")
        first = job.wait_for(16)
        turns = job.wait_for(JUDGED)
        job.end()
    ratio = over_ring(turns)
    took = [round(turn["took"][0], 2) for turn in first]
    print(f"two switches: {first[0]['switches']}, turns {took}, then {ratio:.3f} of a ring")
    print([[round(part, 2) for part in turn["parts"]] for turn in first])
    large, small, _ = turns[-1]["parts"]
    assert ratio < 0.95, turns
    assert large > 1.3 * small, turns
