"""Are two loss curves the same but for rounding? Gloo against itself is the measure.

Floats add up differently in a different order, and training amplifies the difference, step after step. So two
correct backends do not give the same losses, and there is no fixed tolerance: we run gloo again with its ranks
permuted, which changes the order of its sums and nothing else, and ask that netfold be no farther from gloo.

The statistic. At each of the first steps take the largest difference so far between netfold's loss and gloo's,
over the largest so far between any two of the gloo runs; then the geometric mean over the steps. "So far",
because two diverging curves cross; a geometric mean, because the differences grow a thousandfold within a few
steps, and the early ones, where rounding is not yet amplified, are those that tell a wrong sum from rounding.
Why more than 1 is allowed: netfold is one more sample of the same noise, and would exceed the largest of a few
others now and then. Measured with 5 seeds, 20 steps and gradients added in 8 orders, each in turn as the candidate:
0.86 in the median, 2.6 at most. Gradients rounded to bfloat16, the mildest real mistake: 249 at least.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ALLOWED_RATIO = 4.0
# One last bit of a worker's f32 loss (between 1/64 and 1/32), over 4 workers: smaller differences do not show.
SMALLEST_DIFFERENCE = 2.0**-31


@dataclass(frozen=True)
class Agreement:
    """How far netfold is from gloo, in units of how far gloo is from itself."""

    difference: NDArray[np.float64]
    """|netfold - gloo| a compared step."""
    gloo_differences: NDArray[np.float64]
    """|gloo with permuted ranks - gloo|, [permutations, compared steps]."""
    ratio: float

    @property
    def within_rounding(self) -> bool:
        return self.ratio <= ALLOWED_RATIO

    @property
    def gloo_ever_differs(self) -> bool:
        """Whether gloo's losses depend on the order of its ranks. Not with 2: a + b = b + a."""
        return bool(self.gloo_differences.any())

    def in_words(self) -> str:
        if not self.gloo_ever_differs:
            return (
                f"gloo's do not depend on the order of its ranks, and netfold's differ from them by "
                f"{float(self.difference.max()):.2g} at most"
            )
        return (
            f"netfold's are {self.ratio:.{2 if self.ratio < 10 else 0}f} times as far from gloo's as gloo's are from "
            f"each other with its ranks permuted (up to {ALLOWED_RATIO:.0f} is rounding)"
        )

    @property
    def steps(self) -> int:
        return len(self.difference)


def compare(netfold: Sequence[float], gloo: Sequence[float], permuted: Sequence[Sequence[float]]) -> Agreement:
    """Over the steps of the shortest permuted run."""
    steps = min(len(losses) for losses in permuted)
    candidate = np.asarray(netfold[:steps])
    gloos = [np.asarray(losses[:steps]) for losses in (gloo, *permuted)]
    noise = np.max([_largest_so_far(a, b) for a, b in itertools.combinations(gloos, 2)], axis=0)
    ratio = float(np.exp(np.mean(np.log(_largest_so_far(candidate, gloos[0]) / noise))))
    return Agreement(np.abs(candidate - gloos[0]), np.stack([np.abs(losses - gloos[0]) for losses in gloos[1:]]), ratio)


def _largest_so_far(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    largest: NDArray[np.float64] = np.maximum(np.maximum.accumulate(np.abs(a - b)), SMALLEST_DIFFERENCE)
    return largest
