"""Run a function as N ranks in N processes, with a deadline, and a switch beside them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from load import Deadline, seconds

# Ranks and switches are forked off one process that has imported all that they need, which takes seconds of a core, and
# has started no thread. netfold reads the environment later than at import.
_FORKS = multiprocessing.get_context("forkserver")
_OF_RANKS = (
    "pytest",
    "torch.distributed.pipelining",
    "torch.distributed.checkpoint",
    "netfold.torch.operations",
    "netfold_train.rank",
    "netfold_train.trainer",
)
_OF_SWITCHES = ("asyncio", "cryptography.x509", "rich.console", "netfold.cli.switch")
_FORKS.set_forkserver_preload([*_OF_RANKS, *_OF_SWITCHES])


@dataclass
class Outcome:
    """The value that a rank returned, or the type's name and text of its exception. None and '' when it was killed."""

    value: Any = None
    error: str = ""
    text: str = ""


def _enter(
    results: Connection, function: Callable[..., Any], rank: int, size: int, folder: str, env: dict[str, str], args: Any
) -> None:
    gc.freeze()  # later collections skip the parent's objects, torch and all
    os.environ.clear()
    os.environ.update(env)
    try:
        outcome = Outcome(value=function(rank, size, folder, *args))
    except BaseException as error:
        outcome = Outcome(error=type(error).__name__, text=f"{error}\n{traceback.format_exc()}")
    results.send(outcome)


@functools.cache
def _warm_up() -> None:
    """Wait until the process that ranks are forked off has its imports, so that no rank's deadline includes them."""
    first = _FORKS.Process(target=int)
    first.start()
    first.join()


def run_ranks(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    env: dict[str, str] | None = None,
    timeout_s: float = 60.0,
    dies: Sequence[int] = (),
) -> list[Outcome]:
    """`function(rank, size, folder, *args)` in `size` processes; `folder` is shared and fresh.

    Ranks in `dies` may end without a result. Fails when the deadline passes: nothing may hang. timeout_s: of a quiet
    machine.
    """
    _warm_up()
    outcomes: dict[int, Outcome] = {}
    processes = []
    readers: dict[Connection, int] = {}
    deadline = Deadline(timeout_s)
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
                ready = wait(list(readers), timeout=0.5)
                if deadline.left() == 0.0 and not ready:
                    silent = sorted(readers.values())
                    raise AssertionError(
                        f"ranks {silent} did not finish within {timeout_s} s of a quiet machine; others: {outcomes}"
                    )
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
                process.join(seconds(10))
                assert process.exitcode is not None, "a rank returned its result, but its process did not end"
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
    return [outcomes[rank] for rank in range(size)]


def run_threads(function: Callable[..., Any], size: int, *args: Any, timeout_s: float = 30.0) -> list[Outcome]:
    """As run_ranks, in threads of this process: faster, for ranks that neither import torch nor die."""
    outcomes: dict[int, Outcome] = {}

    def enter(rank: int, folder: str) -> None:
        try:
            outcomes[rank] = Outcome(value=function(rank, size, folder, *args))
        except BaseException as error:
            outcomes[rank] = Outcome(error=type(error).__name__, text=f"{error}\n{traceback.format_exc()}")

    timeout_s = seconds(timeout_s)
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


def run_scripts(
    script: str, size: int, *args: object, env: Mapping[int, Mapping[str, str]] | None = None, timeout_s: float = 60.0
) -> list[str]:
    """`script` as `size` interpreters of their own, with rank and `args` as arguments; what each printed.

    For what a forked process cannot have, such as a library loaded before libc. env: added to the environment, by
    rank. timeout_s: of a quiet machine. Fails where one does not exit with 0.
    """
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank), *map(str, args)],
            env=os.environ | (env or {}).get(rank, {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        said = [process.communicate(timeout=seconds(timeout_s)) for process in processes]
    finally:
        for process in processes:
            process.kill()
    errors = "\n".join(error for _, error in said)
    assert [process.returncode for process in processes] == [0] * size, errors
    return [out for out, _ in said]


def values(outcomes: list[Outcome]) -> list[Any]:
    """Return the values of all ranks; the first error fails the test with its traceback."""
    for rank, outcome in enumerate(outcomes):
        assert not outcome.error, f"rank {rank}: {outcome.error}: {outcome.text}"
    return [outcome.value for outcome in outcomes]


class Daemon:
    """A `netfold` command in a forked process, with the part of Popen that tests use."""

    def __init__(self, args: Sequence[str], log_path: Path, env: Mapping[str, str] | None = None) -> None:
        self.args = list(args)
        log_path.touch()
        reader, writer = _FORKS.Pipe(duplex=False)
        about = (writer, str(log_path), dict(os.environ if env is None else env), os.getcwd(), self.args)
        self._process = _FORKS.Process(target=_run_command, args=about, daemon=True)
        self._process.start()
        writer.close()
        self.pid = self._process.pid or 0
        self.stdout = os.fdopen(os.dup(reader.fileno()))
        reader.close()
        self._lock = threading.Lock()  # a process's end is read once

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        with self._lock:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left < 0:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            wait([self._process.sentinel], left)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            # It may have ended: the process from which it was forked reaps it, and reports the exit code later.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_command(
    *args: str | Path, env: Mapping[str, str] | None = None, timeout_s: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run `netfold args` in a forked process; returns its output as text. timeout_s: of a quiet machine."""
    with tempfile.TemporaryDirectory() as folder:
        process = Daemon([str(arg) for arg in args], Path(folder) / "log", env)
        try:
            # Read while the command runs: its output may be more than a pipe holds.
            killer = threading.Timer(seconds(timeout_s), process.kill)
            killer.start()
            said = process.stdout.read()
            code = process.wait()
            killer.cancel()
        finally:
            process.kill()
            process.stdout.close()
        return subprocess.CompletedProcess(process.args, code, said, (Path(folder) / "log").read_text())


def _run_command(out: Connection, log: str, env: dict[str, str], folder: str, args: Sequence[str]) -> None:
    gc.freeze()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    os.dup2(out.fileno(), 1)
    out.close()
    with open(log, "a") as errors:
        os.dup2(errors.fileno(), 2)
    sys.argv = ["netfold", *args]
    from netfold.cli import main

    main()


@dataclass
class RunningSwitch:
    """A daemon's address, process and log."""

    endpoint: str
    process: Daemon | subprocess.Popen[str]
    log_path: Path

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.endpoint.rpartition(":")
        return host, int(port)

    def log(self) -> str:
        return self.log_path.read_text()

    def wait_for(self, pattern: str, *, count: int = 1, timeout_s: float = 20.0) -> list[str]:
        """Wait until the log has `count` matches of a regular expression; all of them."""
        deadline = time.monotonic() + seconds(timeout_s)
        while True:
            found = re.findall(pattern, self.log())
            if len(found) >= count:
                return found
            assert time.monotonic() < deadline, f"{pattern!r} is not {count} times in the switch's log:\n{self.log()}"
            time.sleep(0.02)


def stop(pid: int) -> None:
    """SIGSTOP; returns once all threads of the process have stopped, which takes until each next gets a core."""
    os.kill(pid, signal.SIGSTOP)
    deadline = Deadline(10)
    while any(
        Path(f"/proc/{pid}/task/{task}/stat").read_text().rpartition(") ")[2][0] != "T"
        for task in os.listdir(f"/proc/{pid}/task")
    ):
        assert deadline.left() > 0, f"process {pid} does not stop"
        time.sleep(0.01)


def private(path: Path, text: str) -> str:
    """Write a file that only its owner can read, as one with tokens or a secret has to be; returns its path."""
    path.touch(mode=0o600)
    path.write_text(text)
    return str(path)


@contextlib.contextmanager
def two_leaves(*words: str, parent: Sequence[str] = ()) -> Iterator[list[RunningSwitch]]:
    """A root and two switches below it. words: options of all. parent: more options of the lower ones."""
    with running_switch(*words) as root:
        below = [*words, "--parent", root.endpoint, *parent]
        with running_switch(*below) as one, running_switch(*below) as other:
            yield [root, one, other]


@contextlib.contextmanager
def running_switch(*options: str, prefix: Sequence[str] = ()) -> Iterator[RunningSwitch]:
    """A daemon on a free loopback port, run under the command `prefix`. SIGTERM must end it with exit code 0."""
    args = ["switch", "--listen", "127.0.0.1:0", "--drain", "0s", *options]
    with tempfile.TemporaryDirectory() as folder:
        log_path = Path(folder) / "log"
        process: Daemon | subprocess.Popen[str]
        if prefix:
            with open(log_path, "w") as log:
                command = [*prefix, sys.executable, "-m", "netfold.cli", *args]
                process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        else:
            process = Daemon(args, log_path)
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
                process.wait(seconds(60))
            finally:
                process.kill()
                process.wait()
                process.stdout.close()
        if stopped:
            assert process.returncode == 0, f"exit code {process.returncode} after SIGTERM:\n{switch.log()}"
        assert "Traceback" not in switch.log(), switch.log()


def hide_memory(rank: int) -> None:
    """Afterwards no other process may read rank 0's memory, whichever user runs this."""
    libc = ctypes.CDLL(None, use_errno=True)
    if rank == 0:
        assert libc.prctl(4, 0, 0, 0, 0) == 0  # PR_SET_DUMPABLE
    else:
        header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        assert libc.capset(header, none) == 0, os.strerror(ctypes.get_errno())
