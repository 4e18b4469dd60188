"""Scale bounds on time by the load of the machine.

A test states a bound for a quiet machine, in seconds. The bound is well below the time that the fault takes, such as a
timeout of 20 s. `seconds` multiplies it by the load at the moment of the call; `Deadline` follows the load.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_CPUS = len(os.sched_getaffinity(0))
_MOST = 10.0


def slowdown() -> float:
    """Runnable threads per CPU, now or averaged over the last minute, whichever is more; between 1 and 10.

    The average alone takes a minute to show a load that has just begun.
    """
    runnable = int(Path("/proc/loadavg").read_text().split()[3].split("/")[0])
    return min(max(1.0, runnable / _CPUS, os.getloadavg()[0] / _CPUS), _MOST)


def seconds(quiet: float) -> float:
    """The bound that stands for `quiet` seconds of a quiet machine now."""
    assert quiet >= 1.0, "a bound of less than a second measures the scheduler of the machine"
    return quiet * slowdown()


class Deadline:
    """`quiet` seconds of a quiet machine from now on. Each moment counts by its own load, which may rise meanwhile."""

    def __init__(self, quiet: float) -> None:
        assert quiet >= 1.0, "a bound of less than a second measures the scheduler of the machine"
        self._left = quiet
        self._seen = time.monotonic()

    def left(self) -> float:
        """Quiet seconds that are left, never below 0. Call it once a second or more often."""
        now = time.monotonic()
        self._left = max(0.0, self._left - (now - self._seen) / slowdown())
        self._seen = now
        return self._left


def settles(holds: Callable[[], bool], quiet: float = 10.0) -> bool:
    """Whether `holds()` becomes true within `quiet` seconds of a quiet machine."""
    deadline = Deadline(quiet)
    while not holds():
        if deadline.left() == 0.0:
            return False
        time.sleep(0.02)
    return True


def run(
    command: Sequence[Any], quiet: float, *, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` with the output as text, within `quiet` seconds of a quiet machine, else TimeoutExpired.

    check: a command that fails raises CalledProcessError, behind its output. options: of subprocess.Popen.
    """
    deadline = Deadline(quiet)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([str(word) for word in command], **(pipes | options)) as process:
        try:
            while deadline.left() > 0.0:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    out, err = process.communicate(timeout=1)
                    ended = subprocess.CompletedProcess(process.args, process.returncode, out, err)
                    if check and process.returncode != 0:
                        print(out, err, sep="\n")
                        ended.check_returncode()
                    return ended
            raise subprocess.TimeoutExpired(process.args, quiet)
        finally:
            process.kill()
