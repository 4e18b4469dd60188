"""Compare two loss curves: are they equal but for rounding? Gloo's difference from itself is the measure.

A sum of floats depends on the order, and training amplifies the difference step after step. So two correct backends
have different losses, and there is no fixed tolerance. Gloo runs again with permuted ranks, which changes only the
order of its sums. Netfold must not differ from gloo by more than these runs differ.

The statistic: at each of the first steps, the largest difference so far between netfold's loss and gloo's, over the
largest difference so far between any two gloo runs; then the geometric mean over the steps. "So far", because two
diverging curves cross. A geometric mean, because the differences grow a thousandfold within a few steps: the early
steps, where rounding is not yet amplified, distinguish a wrong sum from rounding.
The limit is above 1 because netfold is one more sample of the same noise, and sometimes exceeds the largest of a few
other samples. Measured with 5 seeds, 20 steps and gradients added in 8 orders, each in turn as the candidate: 0.86 in
the median, 2.6 at most. Gradients rounded to bfloat16, the smallest real error: 249 at least.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ALLOWED_RATIO = 4.0
# The last bit of a worker's f32 loss (between 1/64 and 1/32), over 4 workers. Smaller differences are not visible.
SMALLEST_DIFFERENCE = 2.0**-31


@dataclass(frozen=True)
class Agreement:
    """The difference of netfold from gloo, in units of gloo's difference from itself."""

    difference: NDArray[np.float64]
    """|netfold - gloo| of each compared step."""
    gloo_differences: NDArray[np.float64]
    """|gloo with permuted ranks - gloo|, [permutations, compared steps]."""
    ratio: float

    @property
    def within_rounding(self) -> bool:
        return self.ratio <= ALLOWED_RATIO

    @property
    def gloo_ever_differs(self) -> bool:
        """Whether gloo's losses depend on the order of its ranks. With 2 ranks they do not: a + b = b + a."""
        return bool(self.gloo_differences.any())

    def in_words(self) -> str:
        if not self.gloo_ever_differs:
            return (
                "gloo's losses do not depend on the order of its ranks, and netfold's losses differ from them by "
                f"{float(self.difference.max()):.2g} at most"
            )
        return (
            f"netfold's losses are {self.ratio:.{2 if self.ratio < 10 else 0}f} times as far from gloo's as gloo's "
            f"losses with permuted ranks are from each other (up to {ALLOWED_RATIO:.0f} is rounding)"
        )

    @property
    def steps(self) -> int:
        return len(self.difference)


def compare(netfold: Sequence[float], gloo: Sequence[float], permuted: Sequence[Sequence[float]]) -> Agreement:
    """Compare the steps of the shortest permuted run."""
    steps = min(len(losses) for losses in permuted)
    candidate = np.asarray(netfold[:steps])
    gloos = [np.asarray(losses[:steps]) for losses in (gloo, *permuted)]
    noise = np.max([_largest_so_far(a, b) for a, b in itertools.combinations(gloos, 2)], axis=0)
    ratio = float(np.exp(np.mean(np.log(_largest_so_far(candidate, gloos[0]) / noise))))
    return Agreement(np.abs(candidate - gloos[0]), np.stack([np.abs(losses - gloos[0]) for losses in gloos[1:]]), ratio)


def _largest_so_far(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    largest: NDArray[np.float64] = np.maximum(np.maximum.accumulate(np.abs(a - b)), SMALLEST_DIFFERENCE)
    return largest
