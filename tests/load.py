"""Scale bounds on time by the load of the machine.

A test states a bound for a quiet machine, in seconds. The bound is well below the time that the fault takes, such as a
timeout of 20 s. `seconds` multiplies it by the load at the moment of the call.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

_CPUS = len(os.sched_getaffinity(0))
_MOST = 10.0


def slowdown() -> float:
    """Runnable threads per CPU, averaged over the last minute; between 1 and 10."""
    return min(max(1.0, os.getloadavg()[0] / _CPUS), _MOST)


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
