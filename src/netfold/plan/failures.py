"""What failures leave of a long run: how much of the time makes progress, with a checkpoint how often.

Failures come at any time alike (exponentially), in computing, saving and restarting too. One costs what was computed
since the last checkpoint, and a restart. The expectation is Daly's (J. Daly, "A higher order estimate of the optimum
checkpoint interval for restart dumps", FGCS 2006, equation 20), the interval the exact minimum of it; Young's
sqrt(2 x checkpoint x time between failures) (CACM 1974) is its limit for short checkpoints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

# Newton's steps for the optimum: each doubles the digits or halves the way to 1, so this is more than a double has.
_STEPS = 60


@dataclass(frozen=True)
class Failures:
    """between_s: mean time between failures of one device. ranks: devices; any one's failure stops the job.

    checkpoint_s: that a checkpoint holds training up for. restart_s: from a failure until training goes on, noticing it
    included. Raises ValueError for times that are none.
    """

    between_s: float
    ranks: int
    checkpoint_s: float
    restart_s: float

    def __post_init__(self) -> None:
        if self.between_s <= 0 or self.ranks < 1:
            raise ValueError("failures need a mean time between them above 0, and a device or more to fail")
        if self.checkpoint_s <= 0 or self.restart_s < 0:
            raise ValueError("a checkpoint takes time, and a restart 0 or more; give seconds")

    @property
    def job_between_s(self) -> float:
        """Between failures of any of the devices."""
        return self.between_s / self.ranks


def expected_goodput(failures: Failures, interval_s: float) -> float:
    """The part of a long run's time that makes progress, 0 to 1, with so much computing between two checkpoints."""
    if interval_s <= 0:
        raise ValueError(f"a checkpoint every {interval_s:g} s leaves no time to train; give more than 0")
    between_s = failures.job_between_s
    exponent = (failures.restart_s + interval_s + failures.checkpoint_s) / between_s
    if exponent > 700:  # no double holds the time that it takes; nor will anybody wait for it
        return 0.0
    segment = (interval_s + failures.checkpoint_s) / between_s
    return interval_s / (between_s * math.exp(failures.restart_s / between_s) * math.expm1(segment))


def best_interval_s(failures: Failures) -> float:
    """Seconds of computing between checkpoints that lose least.

    The root of (1 - t/M) exp((t + c)/M) = 1, with t the interval, c the checkpoint and M the time between failures;
    restarts cost the same whatever the interval.
    """
    between_s, checkpoint_s = failures.job_between_s, failures.checkpoint_s
    # In t/M, from Young's, which is above the root: log(1 - x) + x + c/M is concave, so from there Newton's steps come
    # down to it. Where checkpoints take so long that Young's is no start, a step may pass 1 and is halved.
    at = min(young_interval_s(failures) / between_s, 0.999999)
    for _ in range(_STEPS):
        step = (math.log1p(-at) + at + checkpoint_s / between_s) * (1 - at) / at
        at = at + step if at + step < 1 else (at + 1) / 2
        if abs(step) < 1e-15 or at == 1:
            break
    return at * between_s


def young_interval_s(failures: Failures) -> float:
    return math.sqrt(2 * failures.checkpoint_s * failures.job_between_s)


def simulated_goodput(failures: Failures, interval_s: float, *, segments: int = 10_000, seed: int = 0) -> float:
    """The same by playing a run until so many segments are done, failure by failure: the expectation's check.

    Cost: a few operations a segment and failure. Raises ValueError where failures come so fast that it would not end.
    """
    if expected_goodput(failures, interval_s) < 1e-3:
        raise ValueError(
            f"with failures every {failures.job_between_s:.3g} s and a checkpoint every {interval_s:.3g} s hardly "
            "anything is ever done; save more often, or on fewer devices"
        )
    chance, between_s = np.random.default_rng(seed), failures.job_between_s
    now_s, done, next_failure_s = 0.0, 0, float(chance.exponential(between_s))
    while done < segments:
        ends_s = now_s + interval_s + failures.checkpoint_s
        if next_failure_s >= ends_s:
            now_s, done = ends_s, done + 1
            continue
        # Restarts fail too, until one does not.
        while True:
            now_s = next_failure_s
            next_failure_s = now_s + float(chance.exponential(between_s))
            if next_failure_s >= now_s + failures.restart_s:
                now_s += failures.restart_s
                break
    return segments * interval_s / now_s
