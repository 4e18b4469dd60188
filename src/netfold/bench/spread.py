"""A median and how far the values lie around it. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


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
        """In another unit; `factor` is above 0."""
        return Spread(
            self.median * factor, self.p5 * factor, self.p25 * factor, self.p75 * factor, self.p95 * factor, self.n
        )


def spread(values: Sequence[float]) -> Spread:
    ordered = sorted(values)
    if not ordered:
        raise ValueError("a spread of no values; run at least one round")
    return Spread(
        median=percentile(ordered, 50),
        p5=percentile(ordered, 5),
        p25=percentile(ordered, 25),
        p75=percentile(ordered, 75),
        p95=percentile(ordered, 95),
        n=len(ordered),
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks, as NumPy's default; `ordered` ascends."""
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = math.ceil(position)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def paired_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """One ratio a round: what slowed a whole round down cancels out."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]
