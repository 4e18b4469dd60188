"""Fit a link's latency and rate to a few measured messages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from netfold.tuning.topology import Link

# Only messages of at least this size measure the rate: after a pause, many links pass about 100 kB at once.
_LARGE_BYTES = 256 << 10
_LEAST_LATENCY_S = 1e-7
# A line whose rate explains less than this part of the largest message's time is not distinguishable from noise.
_LEAST_PART = 1e-3


def fit_link(samples: Sequence[tuple[int, float]]) -> Link:
    """Fit latency and rate to (bytes, seconds one way), by least squares of the relative error.

    Of repeated sizes only the fastest sample counts: the link did not delay it. A larger message that was faster counts
    for a smaller one, too. The rate comes from the large messages,
    or from the two largest sizes if there are fewer than two large ones. The latency comes from the smallest size.
    Raises ValueError for fewer than two sizes, and for a time that is not above 0.
    """
    quickest: dict[int, float] = {}
    for size, seconds in samples:
        quickest[size] = min(seconds, quickest.get(size, seconds))
    for size in quickest:
        quickest[size] = min(seconds for other, seconds in quickest.items() if other >= size)
    if len(quickest) < 2:
        raise ValueError(f"a line needs two sizes or more, not {sorted(quickest)}")
    if min(quickest.values()) <= 0:
        raise ValueError(f"a message takes more than 0 s, not {min(quickest.values()):.3g} s")
    large = [size for size in quickest if size >= _LARGE_BYTES]
    counted = large if len(large) >= 2 else sorted(quickest)[-2:]
    sizes, times = np.array(counted, np.float64), np.array([quickest[size] for size in counted])
    (_, per_byte), *_ = np.linalg.lstsq(np.stack([1 / times, sizes / times], axis=1), np.ones(len(times)), rcond=None)
    least, most = min(quickest), max(quickest)
    slowest = quickest[most] / most
    if per_byte <= _LEAST_PART * slowest:  # so fast that noise hides it: the largest message bounds it
        per_byte = slowest
    return Link(max(_LEAST_LATENCY_S, float(quickest[least] - least * per_byte)), float(1 / per_byte))
