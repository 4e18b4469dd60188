"""Run a function as N ranks in N processes, with a deadline, and a switch beside them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# Ranks are forked off one process that has imported torch, which costs a second of a core, and started nothing. What
# reads the environment when it is loaded (our native floor) is not among it.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["pytest", "torch.distributed.pipelining", "torch.distributed.checkpoint"])


@dataclass
class Outcome:
    """What one rank returned, or the type's name and text of what it raised. None and '' when it was killed."""

    value: Any = None
    error: str = ""
    text: str = ""


def _enter(
    results: Connection, function: Callable[..., Any], rank: int, size: int, folder: str, env: dict[str, str], args: Any
) -> None:
    os.environ.clear()
    os.environ.update(env)
    try:
        outcome = Outcome(value=function(rank, size, folder, *args))
    except BaseException as error:
        outcome = Outcome(error=type(error).__name__, text=f"{error}\n{traceback.format_exc()}")
    results.send(outcome)


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
    outcomes: dict[int, Outcome] = {}
    processes = []
    readers: dict[Connection, int] = {}
    deadline = time.monotonic() + timeout_s
    ours = {name: value for name, value in os.environ.items() if not name.startswith("NETFOLD_")} | (env or {})
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(size):
                reader, writer = _FORKS.Pipe(duplex=False)
                process = _FORKS.Process(
                    target=_enter, args=(writer, function, rank, size, folder, ours, args), daemon=True
                )
                process.start()
                writer.close()  # the child's death then ends the pipe
                processes.append(process)
                readers[reader] = rank
            while readers:
                ready = wait(list(readers), timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    silent = sorted(readers.values())
                    raise AssertionError(f"ranks {silent} did not finish within {timeout_s} s; others: {outcomes}")
                for reader in ready:
                    assert isinstance(reader, Connection)
                    rank = readers.pop(reader)
                    try:
                        outcomes[rank] = reader.recv()
                    except EOFError:
                        processes[rank].join()
                        text = f"exit code {processes[rank].exitcode}"
                        outcomes[rank] = Outcome() if rank in dies else Outcome(error="Died", text=text)
                    reader.close()
            for process in processes:
                process.join(max(1.0, deadline - time.monotonic()))
                assert process.exitcode is not None, "a rank returned its result, but its process did not end"
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
    return [outcomes[rank] for rank in range(size)]


def run_threads(function: Callable[..., Any], size: int, *args: Any, timeout_s: float = 30.0) -> list[Outcome]:
    """As run_ranks, in threads of this process: quick, for what neither imports torch nor dies."""
    outcomes: dict[int, Outcome] = {}

    def enter(rank: int, folder: str) -> None:
        try:
            outcomes[rank] = Outcome(value=function(rank, size, folder, *args))
        except BaseException as error:
            outcomes[rank] = Outcome(error=type(error).__name__, text=f"{error}\n{traceback.format_exc()}")

    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory() as folder:
        threads = [threading.Thread(target=enter, args=(rank, folder), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
    silent = [rank for rank in range(size) if rank not in outcomes]
    assert not silent, f"ranks {silent} did not finish within {timeout_s} s; others: {outcomes}"
    return [outcomes[rank] for rank in range(size)]


def values(outcomes: list[Outcome]) -> list[Any]:
    """What the ranks returned; the first error fails the test with its own traceback."""
    for rank, outcome in enumerate(outcomes):
        assert not outcome.error, f"rank {rank}: {outcome.error}: {outcome.text}"
    return [outcome.value for outcome in outcomes]


@dataclass
class RunningSwitch:
    """A daemon's address, process and log."""

    endpoint: str
    process: subprocess.Popen[str]
    log_path: Path

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.endpoint.rpartition(":")
        return host, int(port)

    def log(self) -> str:
        return self.log_path.read_text()

    def wait_for(self, pattern: str, *, count: int = 1, timeout_s: float = 10.0) -> list[str]:
        """Wait until the log has `count` matches of a regular expression; all of them."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = re.findall(pattern, self.log())
            if len(found) >= count:
                return found
            assert time.monotonic() < deadline, f"{pattern!r} is not {count} times in the switch's log:\n{self.log()}"
            time.sleep(0.02)


@contextlib.contextmanager
def running_switch(*options: str) -> Iterator[RunningSwitch]:
    """A daemon on a free loopback port. Stopped by SIGTERM, which must end it with exit code 0."""
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "netfold.cli", "switch", "--listen", "127.0.0.1:0", "--drain-s", "0", *options],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            switch = RunningSwitch(line.split()[-1] if line else "", process, Path(folder) / "log")
            assert line.startswith("netfold switch listening on "), line + switch.log()
            yield switch
            stopped = process.poll() is None
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            finally:
                process.kill()
                process.wait()
                process.stdout.close()
        if stopped:
            assert process.returncode == 0, f"exit code {process.returncode} after SIGTERM:\n{switch.log()}"
        assert "Traceback" not in switch.log(), switch.log()
