"""A rank of four hosts is killed while all start, split or form the next group: no other rank waits for it. Needs root.

Every host is a process that forks its ranks. A moment is drawn from the time that the phase takes without a kill.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from load import seconds

from netfold_lab.rack import Rack
from netfold_lab.rack.command import why_unavailable
from netfold_lab.rack.processes import stop

# A rack needs root, network namespaces and tc. The sentence names what is absent.
LACK = why_unavailable(loss=False)
pytestmark = [pytest.mark.rack, pytest.mark.skipif(LACK is not None, reason=f"an emulated rack cannot be made: {LACK}")]

HOSTS, PER_HOST = 4, 8
SIZE = HOSTS * PER_HOST
PHASES = ("start", "split", "reconfigure")
JOIN_S = 20
KILLS = 3
# From the kill to the last error.
SOON_S = 5.0

HOST = """
import json, os, sys, time
from pathlib import Path
import numpy as np
from netfold import Communicator, FileStore, Options

folder, phase, first, count, size = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])

def leave(name, value=""):
    Path(folder, f".{name}").write_text(json.dumps(value))
    os.rename(Path(folder, f".{name}"), Path(folder, name))

def wait_for(name):
    while not Path(folder, name).exists():
        time.sleep(0.01)

def check_sum(group):
    values = np.arange(1000.0) * (group.rank + 1)
    group.all_reduce(values)
    assert np.array_equal(values, np.arange(1000.0) * (group.size * (group.size + 1) / 2))

def be(rank):
    options = {"options": Options(interface="eth0", probe="off"), "timeout_s": 60, "join_timeout_s": JOIN_S}
    group = handles = None
    if phase != "start":
        group = Communicator(FileStore(str(folder / "store")), rank, size, **options)
        handles = group.handles
    leave(f"ready-{rank}", os.getpid())
    wait_for("go")
    error = ""
    try:
        if phase == "start":
            group = Communicator(FileStore(str(folder / "store")), rank, size, **options)
        elif phase == "split":
            check_sum(group.split(rank % 3))
        else:
            group.reconfigure("next", list(reversed(handles)), timeout_s=JOIN_S)
        check_sum(group)
    except Exception as found:
        error = f"{type(found).__name__}: {found}"
    leave(f"ended-{rank}", (time.time(), error))
    wait_for("after")
    if handles is not None:
        lost = int(Path(folder, "after").read_text())
        group.reconfigure("after", [each for at, each in enumerate(handles) if at != lost], timeout_s=60)
        check_sum(group)
    leave(f"after-{rank}")
    wait_for("end")

ranks = []
for rank in range(first, first + count):
    ranks.append(os.fork())
    if ranks[-1] == 0:
        be(rank)
        os._exit(0)
for pid in ranks:
    os.waitpid(pid, 0)
""".replace("JOIN_S", str(JOIN_S))


def found(folder: Path, name: str) -> dict[int, Any]:
    return {int(path.name.split("-")[1]): json.loads(path.read_text()) for path in folder.glob(f"{name}-*")}


def until(condition: Callable[[], bool], what: str, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def run(folder: Path, phase: str, victim: int | None = None, after_s: float = 0.0) -> tuple[float, dict[int, str]]:
    """Kill the rank so long after the phase began. Seconds from then to the last other rank's end, and all errors."""
    (folder / "store").mkdir(parents=True)
    others = set(range(SIZE)) - {victim}
    with Rack(HOSTS, "10gbit") as rack:
        hosts = [
            rack.popen(at, [sys.executable, "-c", HOST, str(folder), phase, *map(str, (at * PER_HOST, PER_HOST, SIZE))])
            for at in range(HOSTS)
        ]
        try:
            until(lambda: len(found(folder, "ready")) == SIZE, "not all ranks came", seconds(60))
            (folder / "go").touch()
            began = time.time()
            if victim is not None:
                time.sleep(after_s)
                os.kill(found(folder, "ready")[victim], signal.SIGKILL)
                began = time.time()
            until(lambda: found(folder, "ended").keys() >= others, "not all ranks ended", seconds(60))
            (folder / ".after").write_text(str(-1 if victim is None else victim))
            os.rename(folder / ".after", folder / "after")
            if phase != "start" and victim is not None:
                until(lambda: found(folder, "after").keys() >= others, "the others formed no group", seconds(60))
        finally:
            stop(hosts)
    ended = {rank: answer for rank, answer in found(folder, "ended").items() if rank in others}
    return max(at for at, _ in ended.values()) - began, {rank: error for rank, (_, error) in ended.items()}


@pytest.mark.parametrize("phase", PHASES)
def test_no_rank_waits_for_one_that_was_killed(phase: str, tmp_path: Path) -> None:
    takes_s, errors = run(tmp_path / "whole", phase)
    assert not any(errors.values()), errors
    draw = random.Random(phase)
    for number in range(KILLS):
        victim = draw.randrange(SIZE)
        late_s, errors = run(tmp_path / str(number), phase, victim, draw.uniform(0.0, takes_s))
        # One that was killed before it published its address is missed at the end of the join timeout.
        assert late_s < seconds(SOON_S) + (JOIN_S if phase == "start" else 0)
        called = {f"rank {number}" for number in (victim, victim // 3, SIZE - 1 - victim)}  # in the phase's groups
        for error in filter(None, errors.values()):
            assert any(name in error for name in called), error
            assert not error.startswith("Mismatch"), error
