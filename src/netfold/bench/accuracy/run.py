"""Starts a switch and the ranks on this machine, and gives back what rank 0 found."""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from netfold.bench.accuracy.settings import Settings
from netfold.rack.aggregator import aggregator_argv, start_aggregator
from netfold.rack.processes import Process, follow, spawn, stop, supervise, uninterrupted

Say = Callable[[str], None]

_KEPT_LINES = 30


class AccuracyError(RuntimeError):
    """A rank failed; with what it said last."""


def measure_accuracy(settings: Settings, say: Say, deadline_s: float) -> dict[str, Any]:
    """What `rank.main` writes. Raises AccuracyError, RackError where the switch cannot start. Leaves no process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # Every training has its own wire, and all of them the switch.
    for variable in ("NETFOLD_WIRE_DTYPE", "NETFOLD_ALGORITHM"):
        environment.pop(variable, None)
    processes: list[Process] = []

    def start(command: Sequence[str]) -> Process:
        processes.append(spawn(command, environment))
        return processes[-1]

    with tempfile.TemporaryDirectory(prefix="netfold-accuracy-") as folder:
        try:
            environment["NETFOLD_SWITCH"] = start_aggregator(start, aggregator_argv("127.0.0.1:0"), _silent).address
            ranks, said, readers = [], [], []
            for rank in range(settings.ranks):
                environment["RANK"] = str(rank)
                ranks.append(start([sys.executable, "-m", __package__ + ".rank", settings.to_json(), folder]))
                said.append(_Heard(say if rank == 0 else _silent))
                readers.append(follow(ranks[-1], said[-1]))
            outcome = supervise(ranks, deadline_s)
        finally:
            with uninterrupted():
                stop(processes)
        if outcome.exit_code != 0:
            for reader in readers:
                reader.join(1)
            failed = outcome.first_failed or 0
            reason = f"did not end within {deadline_s:g} s" if outcome.timed_out else "failed"
            raise AccuracyError(f"rank {failed} {reason}; it said:\n" + "\n".join(said[failed].lines))
        found: dict[str, Any] = json.loads(Path(folder, "found.json").read_text())
        return found


def _silent(line: str) -> None:
    """Of what is not shown."""


class _Heard:
    """Passes a rank's lines on, and keeps the last of them."""

    def __init__(self, say: Say) -> None:
        self.lines: list[str] = []
        self._say = say

    def __call__(self, line: str) -> None:
        self.lines = [*self.lines, line][-_KEPT_LINES:]
        self._say(line)
