"""Rounds of several cases, and what their values come to: a median, percentiles, paired ratios. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

Case = TypeVar("Case")


@dataclass(frozen=True)
class Spread:
    """Percentiles 5, 25, 50, 75 and 95 of `n` values, in the values' own unit."""

    median: float
    p5: float
    p25: float
    p75: float
    p95: float
    n: int

    def scaled(self, factor: float) -> "Spread":
        """Return the spread in another unit; `factor` is above 0."""
        return Spread(
            self.median * factor, self.p5 * factor, self.p25 * factor, self.p75 * factor, self.p95 * factor, self.n
        )


def spread(values: Sequence[float]) -> Spread:
    """Return the spread of one or more values. Raises ValueError for none."""
    if not values:
        raise ValueError("a spread of no values; run at least one round")
    p5, p25, median, p75, p95 = np.percentile(values, (5, 25, 50, 75, 95)).tolist()
    return Spread(median, p5, p25, p75, p95, len(values))


def paired_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Return one ratio a round: a disturbance that slows a whole round cancels out."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def interleave(cases: Sequence[Case], rounds: Iterable[int]) -> Iterator[tuple[int, Case]]:
    """Yield (round, case): every case in every round, and another case first in each.

    rounds: their numbers, ascending; those below 0 are warm-ups.
    So a disturbance of the machine affects all cases alike, and each is first equally often (the first one meets colder
    caches).
    """
    for number in rounds:
        for place in range(len(cases)):
            yield number, cases[(number + place) % len(cases)]
