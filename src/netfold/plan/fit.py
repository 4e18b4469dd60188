"""From a few measured messages to a link."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from netfold.plan.topology import Link

_LEAST_LATENCY_S = 1e-7


def fit_link(samples: Sequence[tuple[int, float]]) -> Link:
    """The latency and rate that explain (bytes, seconds one way) best, by least squares of the relative error.

    Of repeated sizes the quickest counts: what made others slower was not the link. Needs two sizes or more.
    """
    quickest: dict[int, float] = {}
    for size, seconds in samples:
        quickest[size] = min(seconds, quickest.get(size, seconds))
    if len(quickest) < 2:
        raise ValueError(f"a line needs two sizes or more, not {sorted(quickest)}")
    sizes = np.array(list(quickest), np.float64)
    times = np.array(list(quickest.values()), np.float64)
    rows = np.stack([1 / times, sizes / times], axis=1)
    (latency, per_byte), *_ = np.linalg.lstsq(rows, np.ones(len(times)), rcond=None)
    if latency < _LEAST_LATENCY_S:  # the smallest message bounds it
        latency = max(_LEAST_LATENCY_S, float(times[sizes.argmin()]))
    if per_byte <= 0:  # too fast to tell from the noise: the largest message bounds it
        per_byte = float(times[sizes.argmax()] / sizes.max())
    return Link(float(latency), float(1 / per_byte))
