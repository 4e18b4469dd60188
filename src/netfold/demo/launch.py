"""Starts the switch and the workers as processes of this machine, and ends every one of them on every way out."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType

from netfold.demo.settings import Job

# How long the switch may take to say where it listens.
SWITCH_START_S = 30.0
# How long all workers together may go without a step, start-up included, before they count as hung.
STALL_S = 120.0
# How long a process may take to end after SIGTERM before it gets SIGKILL.
GRACE_S = 5.0
OUTPUT_TAIL_LINES = 30
SWITCH_SAYS = "netfold switch listening on "
SWITCH = (sys.executable, "-m", "netfold.cli", "switch", "--listen", "127.0.0.1:0")
# How a line of rank 0 about a step starts; see worker.py.
STEP_STARTS = b'{"run": '
WORKER = (sys.executable, "-m", "netfold.demo.worker")


class LaunchError(RuntimeError):
    """A process of the demo did not start, failed, or hung; the message ends with what it wrote last."""


@contextlib.contextmanager
def signals_unwind() -> Iterator[None]:
    """While inside, SIGTERM and SIGHUP leave through every `finally`, as Ctrl-C does, so no process is left."""

    def leave(number: int, _: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def switch(folder: Path) -> Iterator[str]:
    """A `netfold switch` on a free loopback port; yields its address, host:port."""
    log = folder / "switch.log"
    with log.open("wb") as output:
        process = subprocess.Popen(SWITCH, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        yield _address_said(process, log)
    finally:
        _end([process])


def train(job: Job, environment: Mapping[str, str], stepped: Callable[[str, int, float], None]) -> None:
    """Run a job's workers to their end; `stepped(run, step, loss)` is called for each of rank 0's steps.

    Raises LaunchError when a worker fails, or when nothing moves for STALL_S seconds.
    """
    workers = job.training.workers
    logs = [Path(job.folder) / f"worker{rank}.log" for rank in range(workers)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            processes.append(_start_worker(job, rank, log, environment))
        _watch(processes, logs, stepped)
    finally:
        _end(processes)


def _start_worker(job: Job, rank: int, log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            [*WORKER, job.to_json()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if rank == 0 else output,
            stderr=output,
            env={
                **os.environ,
                **environment,
                "RANK": str(rank),
                "WORLD_SIZE": str(job.training.workers),
                "OMP_NUM_THREADS": "1",
                # All are on this machine: its name need not resolve, and `lo` carries every byte.
                "GLOO_SOCKET_IFNAME": "lo",
            },
        )


def _watch(
    processes: list[subprocess.Popen[bytes]], logs: list[Path], stepped: Callable[[str, int, float], None]
) -> None:
    told = processes[0].stdout
    assert told is not None
    unfinished, moved_s = b"", time.monotonic()
    with told, selectors.DefaultSelector() as selector:
        selector.register(told, selectors.EVENT_READ)
        while True:
            if selector.get_map() and selector.select(timeout=0.1):
                news = os.read(told.fileno(), 65536)
                if not news:
                    selector.unregister(told)
                *lines, unfinished = (unfinished + news).split(b"\n")
                for line in lines:
                    # gloo, too, may say something on stdout.
                    if line.startswith(STEP_STARTS):
                        step = json.loads(line)
                        stepped(step["run"], step["step"], step["loss"])
                        moved_s = time.monotonic()
            elif not selector.get_map():
                time.sleep(0.05)
            codes = [process.poll() for process in processes]
            failed = [rank for rank, code in enumerate(codes) if code]
            if failed:
                # One killed by a signal first: the others may have failed because it was gone.
                rank = min(failed, key=lambda rank: codes[rank] or 0)
                raise LaunchError(f"worker {rank} of {len(codes)} {_ended(codes[rank] or 0)}.\n{_tail(logs[rank])}")
            if all(code == 0 for code in codes) and not selector.get_map():
                return
            if time.monotonic() - moved_s > STALL_S:
                ranks = [rank for rank, code in enumerate(codes) if code is None]
                raise LaunchError(
                    f"no step for {STALL_S:.0f} s; workers {ranks} still run and were stopped. Is this machine "
                    f"busy with something else? If not, they wait for each other.\n{_tail(logs[ranks[0]])}"
                )


def _address_said(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline_s = time.monotonic() + SWITCH_START_S
    while time.monotonic() < deadline_s:
        for line in log.read_text(errors="replace").splitlines(keepends=True):
            if line.startswith(SWITCH_SAYS) and line.endswith("\n"):
                return line.removeprefix(SWITCH_SAYS).strip()
        if process.poll() is not None:
            raise LaunchError(f"the switch {_ended(process.returncode)} before it listened.\n{_tail(log)}")
        time.sleep(0.02)
    raise LaunchError(f"the switch did not say where it listens within {SWITCH_START_S:.0f} s.\n{_tail(log)}")


def _ended(code: int) -> str:
    return f"ended with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-OUTPUT_TAIL_LINES:]
    return "Its last output:\n" + "\n".join(f"  {line}" for line in lines) if lines else "It wrote nothing."


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline_s = time.monotonic() + GRACE_S
    for process in processes:
        try:
            process.wait(timeout=max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
