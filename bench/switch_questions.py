"""How long a switch with many busy jobs takes to answer: /metrics, /healthz, and a worker that joins.

    .venv/bin/python bench/switch_questions.py [JOBS ...]      # 0 8 64; about a minute

Each job is two ranks that add 256 KB of f32 without pause over loopback, threads of a few processes. Beside them a
process asks the switch for a page, or joins a job of one worker and leaves it, in turns, with a pause between. The time
of a join is from connecting to `start`: TCP, the hello packets there and back, and what the switch grants. Every sum is
checked. Writes bench/results/switch_questions.md.
"""

from __future__ import annotations

import contextlib
import http.client
import multiprocessing
import os
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from typing import Any

import numpy as np

from netfold import Communicator, FileStore, Options
from netfold.bench.machine import spoken
from netfold.bench.spread import spread
from netfold.communicator.membership import Membership
from netfold.rack.aggregator import start_aggregator
from netfold.rack.processes import spawn, stop
from netfold.switch_protocol.control_client import SwitchAccess

COUNT = 1 << 16  # f32: 256 KB
ROUNDS = 40
PAUSE_S = 0.1
JOBS_A_PROCESS = 8
METRICS = "127.0.0.1:19171"
RESULT = Path(__file__).parent / "results" / "switch_questions.md"
ASKED_MS = {"/metrics": 100.0, "/healthz": 100.0, "join": 1000.0}

_SPAWN = multiprocessing.get_context("spawn")


def busy(jobs: int, endpoint: str, folder: str, ready: Barrier, over: Event, operations: Any) -> None:
    """`jobs` jobs of two ranks each, threads of this process, until `over`."""

    def rank(job: int, place: int) -> None:
        whole = np.arange(COUNT, dtype=np.float32) % 1000
        options = Options(switch=endpoint, algorithm="all_reduce=in_network")
        with Communicator(FileStore(f"{folder}/{job}"), place, 2, options=options, timeout_s=300) as group:
            ready.wait()
            # The ranks end after the same operation: the last value of each says whether to go on.
            while True:
                buffer = whole + place
                buffer[-1] = 0 if over.is_set() else 1
                group.all_reduce(buffer)
                assert (buffer[:-1] == 2 * whole[:-1] + 1).all()
                with operations.get_lock():
                    operations.value += 1
                if buffer[-1] < 2:
                    return

    threads = [threading.Thread(target=rank, args=(job, place)) for job in range(jobs) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextlib.contextmanager
def load_of(jobs: int, endpoint: str) -> Iterator[Any]:
    """So many busy jobs, all of them under way; a count of their operations, by rank."""
    operations = _SPAWN.Value("q", 0)
    with tempfile.TemporaryDirectory() as folder:
        parts = [min(JOBS_A_PROCESS, jobs - first) for first in range(0, jobs, JOBS_A_PROCESS)]
        ready, over = _SPAWN.Barrier(2 * jobs + 1), _SPAWN.Event()
        processes = []
        for number, part in enumerate(parts):
            os.mkdir(f"{folder}/{number}")
            arguments = (part, endpoint, f"{folder}/{number}", ready, over, operations)
            processes.append(_SPAWN.Process(target=busy, args=arguments, daemon=True))
        try:
            for process in processes:
                process.start()
            ready.wait(300)
            yield operations
            over.set()
            for process in processes:
                process.join(120)
                assert process.exitcode == 0, f"a process of busy jobs ended with {process.exitcode}"
        finally:
            for process in processes:
                process.kill()


def page(target: str) -> None:
    host, _, port = METRICS.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    try:
        connection.request("GET", target)
        answer = connection.getresponse()
        assert answer.status == 200 and answer.read()
    finally:
        connection.close()


def joined(endpoint: str) -> None:
    access = SwitchAccess(endpoint, None, 0, (0,))
    member = Membership.join(access, job=secrets.token_hex(16), paths=[[0]], timeout_s=60)
    member.leave("the measurement is over")


def measured(jobs: int, endpoint: str) -> dict[str, Any]:
    questions: dict[str, Callable[[], None]] = {
        "/metrics": lambda: page("/metrics"),
        "/healthz": lambda: page("/healthz"),
        "join": lambda: joined(endpoint),
    }
    times: dict[str, list[float]] = {name: [] for name in questions}
    with load_of(jobs, endpoint) as operations:
        time.sleep(1)
        before, began = operations.value, time.monotonic()
        for _ in range(ROUNDS):
            for name, ask in questions.items():
                asked = time.monotonic()
                ask()
                times[name].append((time.monotonic() - asked) * 1e3)
                time.sleep(PAUSE_S / len(questions))
        rate = (operations.value - before) / 2 / (time.monotonic() - began)
    return {"operations": rate, **times}


def main() -> None:
    counts = [int(each) for each in sys.argv[1:]] or [0, 8, 64]
    load = os.getloadavg()[0]
    argv = [sys.executable, "-m", "netfold.cli", "switch", "--listen", "127.0.0.1:0", "--drain-s", "0"]
    argv += ["--metrics", METRICS, "--max-jobs", "128", "--memory", "4G", "--log", "warning"]
    switch = start_aggregator(lambda command: spawn(command, {}), argv, lambda line: None)
    rows = []
    try:
        for jobs in counts:
            found = measured(jobs, switch.address)
            cells = []
            for name in ASKED_MS:
                middle = spread(found[name])
                cells.append(f"{middle.median:.1f} ({middle.p95:.1f}, {max(found[name]):.1f})")
            rows.append(f"| {jobs} | {found['operations']:.0f} | {' | '.join(cells)} |")
            print(rows[-1], flush=True)
    finally:
        stop([switch.process])
    asked = ", ".join(f"{name} {most_ms:.0f} ms" for name, most_ms in ASKED_MS.items())
    RESULT.write_text(
        "# How long a switch with busy jobs takes to answer\n\n"
        f"`.venv/bin/python bench/switch_questions.py`: each job is two ranks that add {COUNT >> 8} KB of f32 without "
        f"pause over loopback,\nbeside a process that asks the switch. Milliseconds: median (95th percentile, longest) "
        f"of {ROUNDS}. A join is one\nworker's, from connecting to `start`. The goals with 64 jobs: {asked}.\n\n"
        "| jobs | all_reduces a second, all jobs | "
        + " | ".join(ASKED_MS)
        + " |\n|---|---|---|---|---|\n"
        + "\n".join(rows)
        + f"\n\nRanks, switch and the process that asks share {spoken((load, os.getloadavg()[0]))}\n"
    )


if __name__ == "__main__":
    main()
