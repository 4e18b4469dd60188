"""Many processes as one: stream their output, wait for all, stop all when one fails."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

Process = subprocess.Popen[str]

# When one process fails, its peers often fail a moment later with a better message; wait this long for them.
FAILURE_GRACE_S = 2.0
# From SIGTERM to SIGKILL.
TERM_GRACE_S = 3.0
# A process can leave a child that holds its output open; wait at most this long for its lines.
DRAIN_S = 1.0
_POLL_S = 0.02
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def spawn(argv: Sequence[str], environment: Mapping[str, str]) -> Process:
    """Start a process in its own session, with output and errors on one pipe of lines.

    Its own session: Ctrl-C at the terminal signals only this process, which ends the whole group in order.
    """
    return subprocess.Popen(
        argv,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def follow(process: Process, on_line: Callable[[str], None]) -> threading.Thread:
    """Start a thread that passes every line of the output of `process`, without its line end, to `on_line`."""
    output = process.stdout
    assert output is not None, "spawn() gives every process a pipe"

    def read() -> None:
        for line in output:
            on_line(line.rstrip("\n"))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


@dataclass(frozen=True)
class Outcome:
    """The end of a group of processes."""

    exit_code: int  # the first that was not 0, in a shell's form; 124 after the deadline, as timeout(1)
    first_failed: int | None = None  # index of the process
    timed_out: bool = False


def supervise(processes: Sequence[Process], deadline_s: float | None = None) -> Outcome:
    """Wait until all processes have ended; when one fails, or at the deadline, stop the others."""
    started = time.monotonic()
    while True:
        codes = [process.poll() for process in processes]
        for index, code in enumerate(codes):
            if code:
                wait_for_end(processes, FAILURE_GRACE_S)
                stop(processes)
                return Outcome(exit_code=_as_shell(code), first_failed=index)
        if all(code == 0 for code in codes):
            return Outcome(exit_code=0)
        if deadline_s is not None and time.monotonic() - started > deadline_s:
            stop(processes)
            return Outcome(exit_code=124, timed_out=True)
        time.sleep(_POLL_S)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Block the signals of `exit_on_signals` during the block, so that clean-up is complete."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@uninterrupted()
def stop(processes: Sequence[Process]) -> None:
    """End the processes that still run, with their process groups: SIGTERM, then SIGKILL after TERM_GRACE_S."""
    for process in processes:
        if process.poll() is None:
            _signal_group(process, signal.SIGTERM)
    wait_for_end(processes, TERM_GRACE_S)
    for process in processes:
        if process.poll() is None:
            _signal_group(process, signal.SIGKILL)
    for process in processes:
        process.wait()


def wait_for_end(processes: Sequence[Process], limit_s: float) -> None:
    """Wait until all processes have ended, for at most `limit_s`."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(_POLL_S)


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Turn SIGINT, SIGTERM and SIGHUP into SystemExit, so that every `with` block cleans up."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in _STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _signal_group(process: Process, number: signal.Signals) -> None:
    # The group can end between poll() and here.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _as_shell(code: int) -> int:
    return 128 - code if code < 0 else code
