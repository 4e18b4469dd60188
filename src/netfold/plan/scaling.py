"""What a few small runs of a data-parallel job say about large ones, where its network and library are not known.

A step that hides its communication still grows: ranks wait for the latest of them, and a reduction's trees and rings
get deeper. Both grow with the logarithm of the ranks (the expected largest of n like deviations, for one), so a rank's
time for a sample is taken as a line over the doublings. Where links are known, `netfold.plan.step` says more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Of a measured throughput, from run to run; beside what its rounding hides.
_REPEATS = 0.02
# Ten and ninety of a hundred, of a normal deviation.
_EIGHTY = 1.2816


@dataclass(frozen=True)
class Law:
    """sample_s: of one rank alone, a sample; doubling_s: more for each doubling of the ranks. spread: half of the 80%
    band, as a part."""

    sample_s: float
    doubling_s: float
    spread: float

    def samples_per_s(self, ranks: int) -> float:
        """Of all ranks together."""
        return ranks / (self.sample_s + self.doubling_s * math.log2(ranks))


def fit_law(runs: Sequence[tuple[int, float]], resolution: float) -> Law:
    """runs: ranks, and samples a second of all of them. resolution: to what these were rounded.

    Weighed least squares: a rounded small number says less. Raises ValueError for fewer than three sizes.
    """
    sizes = {ranks for ranks, _ in runs}
    if len(sizes) < 3:
        raise ValueError(f"a law needs runs of three sizes at least, not {len(sizes)}")
    ranks = np.array([count for count, _ in runs], dtype=float)
    rate = np.array([samples for _, samples in runs])
    seconds = ranks / rate
    # A rounded number is anywhere within its last digit: a deviation of a twelfth's root.
    deviation = np.hypot(resolution / math.sqrt(12) / rate, _REPEATS) * seconds
    terms = np.stack([np.ones(len(runs)), np.log2(ranks)], axis=1) / deviation[:, None]
    (alone, doubling), *_ = np.linalg.lstsq(terms, seconds / deviation, rcond=None)
    doubling = max(0.0, float(doubling))
    off = np.abs((alone + doubling * np.log2(ranks)) / seconds - 1)
    return Law(float(alone), doubling, _EIGHTY * max(_REPEATS, float(np.sqrt((off**2).sum() / (len(runs) - 2)))))
