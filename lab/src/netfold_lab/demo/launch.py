"""Start the switch and the workers as processes of this machine, and end all of them on every exit."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from netfold_lab.demo.settings import Job
from netfold_lab.rack.processes import DRAIN_S, Process, follow, spawn, stop

# The switch must print its address within this time.
SWITCH_START_S = 30.0
# Workers that make no step for this time, start-up included, count as hung.
STALL_S = 120.0
OUTPUT_TAIL_LINES = 30
SWITCH_SAYS = "netfold switch listening on "
SWITCH = (sys.executable, "-m", "netfold.cli", "switch", "--listen", "127.0.0.1:0")
# The begin of rank 0's line about a step; see worker.py.
STEP_STARTS = '{"run": '
WORKER = (sys.executable, "-m", "netfold_lab.demo.worker")


class LaunchError(RuntimeError):
    """A process of the demo did not start, failed, or hung; the message ends with the process's last output."""


class _Running:
    """A process whose lines with a prefix go to `marked`; the last other lines are kept for errors."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], prefix: str) -> None:
        self._prefix = prefix
        self._tail: deque[str] = deque(maxlen=OUTPUT_TAIL_LINES)
        self.marked: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.process: Process = spawn(argv, environment)
        self.reader = follow(self.process, self._on_line)

    def _on_line(self, line: str) -> None:
        if line.startswith(self._prefix):
            self.marked.put(line)
        else:
            self._tail.append(line)

    def tail(self) -> str:
        if self.process.poll() is not None:
            self.reader.join(DRAIN_S)
        if not self._tail:
            return "It wrote nothing."
        return "\n".join(["Its last output:", *(f"  {line}" for line in self._tail)])


@contextlib.contextmanager
def switch() -> Iterator[str]:
    """Run `netfold switch` on a free loopback port; yields its address, host:port."""
    running = _Running(SWITCH, os.environ, SWITCH_SAYS)
    try:
        yield _address(running)
    finally:
        stop([running.process])


def train(job: Job, environment: Mapping[str, str], stepped: Callable[[str, int, float], None]) -> None:
    """Run a job's workers to their end; `stepped(run, step, loss)` is called for each step of rank 0.

    Raises LaunchError if a worker fails, or if no step is made for STALL_S seconds.
    """
    workers: list[_Running] = []
    try:
        for rank in range(job.training.workers):
            workers.append(_Running([*WORKER, job.to_json()], _environment(job, rank, environment), STEP_STARTS))
        _watch(workers, stepped)
    finally:
        stop([worker.process for worker in workers])


def _address(switch: _Running) -> str:
    deadline_s = time.monotonic() + SWITCH_START_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(queue.Empty):
            return switch.marked.get(timeout=0.1).removeprefix(SWITCH_SAYS).strip()
        if (code := switch.process.poll()) is not None:
            raise LaunchError(f"the switch {_ended(code)} before it listened.\n{switch.tail()}")
    raise LaunchError(f"the switch did not print its address within {SWITCH_START_S:.0f} s.\n{switch.tail()}")


def _environment(job: Job, rank: int, environment: Mapping[str, str]) -> dict[str, str]:
    return {
        **os.environ,
        **environment,
        "RANK": str(rank),
        "WORLD_SIZE": str(job.training.workers),
        "OMP_NUM_THREADS": "1",
        # All workers are on this machine: its name need not resolve, and `lo` carries every byte.
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _watch(workers: Sequence[_Running], stepped: Callable[[str, int, float], None]) -> None:
    first, moved_s = workers[0], time.monotonic()
    while True:
        with contextlib.suppress(queue.Empty):
            step = json.loads(first.marked.get(timeout=0.1))
            stepped(step["run"], step["step"], step["loss"])
            moved_s = time.monotonic()
        codes = [worker.process.poll() for worker in workers]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            # Prefer a rank that a signal killed: other ranks may have failed because it was gone.
            rank = min(failed, key=lambda rank: codes[rank] or 0)
            raise LaunchError(f"worker {rank} of {len(codes)} {_ended(codes[rank] or 0)}.\n{workers[rank].tail()}")
        if all(code == 0 for code in codes) and not first.reader.is_alive() and first.marked.empty():
            return
        if time.monotonic() - moved_s > STALL_S:
            ranks = [rank for rank, code in enumerate(codes) if code is None]
            tail = f"\n{workers[ranks[0]].tail()}" if ranks else ""
            raise LaunchError(
                f"no step for {STALL_S:.0f} s; workers {ranks} still run and were stopped. Is this machine busy with "
                f"another program? If not, the workers wait for each other.{tail}"
            )


def _ended(code: int) -> str:
    return f"ended with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
