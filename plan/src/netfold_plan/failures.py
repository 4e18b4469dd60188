"""The part of a long run's time that makes progress despite failures, and the best interval between checkpoints.

Failures are exponentially distributed, and also happen while a job saves or restarts. A failure costs the computing
since the last checkpoint, and a restart. The expectation is Daly's (J. Daly, "A higher order estimate of the optimum
checkpoint interval for restart dumps", FGCS 2006, equation 20), and the interval is its exact maximum. For short
checkpoints the interval approaches Young's sqrt(2 x checkpoint x time between failures) (CACM 1974).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Newton steps: each one doubles the correct digits or halves the distance to 1, so 60 exhaust a double.
_STEPS = 60


@dataclass(frozen=True)
class Failures:
    """between_s: mean time between failures of one device.

    ranks: devices; a failure of any device stops the job.
    checkpoint_s: for how long a checkpoint stops training.
    restart_s: from a failure until training continues, with the time to notice the failure.
    Raises ValueError for times that are not possible.
    """

    between_s: float
    ranks: int
    checkpoint_s: float
    restart_s: float

    def __post_init__(self) -> None:
        if self.between_s <= 0 or self.ranks < 1:
            raise ValueError("failures need a mean time between them above 0, and at least one device")
        if self.checkpoint_s <= 0 or self.restart_s < 0:
            raise ValueError("a checkpoint takes time, and a restart 0 or more; give seconds")

    @property
    def job_between_s(self) -> float:
        """Mean time between failures of any device."""
        return self.between_s / self.ranks


def expected_goodput(failures: Failures, interval_s: float) -> float:
    """The part of a long run's time that makes progress, 0 to 1. interval_s: computing between two checkpoints."""
    if interval_s <= 0:
        raise ValueError(f"a checkpoint every {interval_s:g} s leaves no time to train; give more than 0")
    between_s = failures.job_between_s
    exponent = (failures.restart_s + interval_s + failures.checkpoint_s) / between_s
    if exponent > 700:  # exp() of more overflows a double
        return 0.0
    segment = (interval_s + failures.checkpoint_s) / between_s
    return interval_s / (between_s * math.exp(failures.restart_s / between_s) * math.expm1(segment))


def best_interval_s(failures: Failures) -> float:
    """Seconds of computing between checkpoints for the highest goodput.

    The root of (1 - t/M) exp((t + c)/M) = 1, with interval t, checkpoint c and time between failures M. The restart
    time does not change the root.
    """
    between_s, checkpoint_s = failures.job_between_s, failures.checkpoint_s
    # In units of M. Young's interval is above the root, and log(1 - x) + x + c/M is concave, so Newton's steps descend
    # to the root. For very long checkpoints Young's is no valid start: a step that would pass 1 is halved.
    at = min(math.sqrt(2 * checkpoint_s / between_s), 0.999999)
    for _ in range(_STEPS):
        step = (math.log1p(-at) + at + checkpoint_s / between_s) * (1 - at) / at
        at = at + step if at + step < 1 else (at + 1) / 2
        if abs(step) < 1e-15 or at == 1:
            break
    return at * between_s
