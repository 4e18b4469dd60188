"""Run a function as N ranks in N processes, with a deadline, and a switch beside them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_SPAWN = multiprocessing.get_context("spawn")


@dataclass
class Outcome:
    """What one rank returned, or the type's name and text of what it raised. None and '' when it was killed."""

    value: Any = None
    error: str = ""
    text: str = ""


def _enter(results: Any, function: Callable[..., Any], rank: int, size: int, folder: str, env: dict[str, str], args: Any) -> None:
    for name in [name for name in os.environ if name.startswith("NETFOLD_")]:
        del os.environ[name]
    os.environ.update(env)
    try:
        results.put((rank, Outcome(value=function(rank, size, folder, *args))))
    except BaseException as error:
        results.put((rank, Outcome(error=type(error).__name__, text=f"{error}\n{traceback.format_exc()}")))


def run_ranks(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    env: dict[str, str] | None = None,
    timeout_s: float = 60.0,
    dies: Sequence[int] = (),
) -> list[Outcome]:
    """`function(rank, size, folder, *args)` in `size` processes; `folder` is shared and fresh.

    Ranks in `dies` may end without a result. Fails when the deadline passes: nothing may hang.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = _SPAWN.Queue()
        processes = [
            _SPAWN.Process(target=_enter, args=(results, function, rank, size, folder, env or {}, args))
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout_s
        try:
            while len(outcomes) < size:
                with contextlib.suppress(queue.Empty):
                    rank, outcome = results.get(timeout=0.1)
                    outcomes[rank] = outcome
                for rank, process in enumerate(processes):
                    if rank in dies and rank not in outcomes and not process.is_alive():
                        outcomes[rank] = Outcome()
                if time.monotonic() > deadline:
                    silent = [rank for rank in range(size) if rank not in outcomes]
                    raise AssertionError(f"ranks {silent} did not finish within {timeout_s} s; others: {outcomes}")
            for process in processes:
                process.join(10)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
    return [outcomes[rank] for rank in range(size)]


def values(outcomes: list[Outcome]) -> list[Any]:
    """What the ranks returned; the first error fails the test with its own traceback."""
    for rank, outcome in enumerate(outcomes):
        assert not outcome.error, f"rank {rank}: {outcome.error}: {outcome.text}"
    return [outcome.value for outcome in outcomes]


@contextlib.contextmanager
def running_switch(*options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A daemon on a free loopback port; its endpoint and process. Stopped by SIGTERM."""
    process = subprocess.Popen(
        [sys.executable, "-m", "netfold.cli", "switch", "--listen", "127.0.0.1:0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line.startswith("netfold switch listening on "), line + process.stderr.read()
        yield line.split()[-1], process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
