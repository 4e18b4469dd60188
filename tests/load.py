"""Scale bounds on time by the load of the machine.

A test states a bound for a quiet machine, in seconds. The bound is well below the time that the fault takes, such as a
timeout of 20 s. `seconds` multiplies it by the load at the moment of the call.
"""

from __future__ import annotations

import os

_CPUS = len(os.sched_getaffinity(0))
_MOST = 10.0


def slowdown() -> float:
    """Runnable threads per CPU, averaged over the last minute; between 1 and 10."""
    return min(max(1.0, os.getloadavg()[0] / _CPUS), _MOST)


def seconds(quiet: float) -> float:
    """The bound that stands for `quiet` seconds of a quiet machine now."""
    assert quiet >= 1.0, "a bound of less than a second measures the scheduler of the machine"
    return quiet * slowdown()
