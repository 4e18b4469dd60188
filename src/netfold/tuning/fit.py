"""From a few measured messages to a link."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from netfold.tuning.topology import Link

# Messages from here on tell the rate: many links let a hundred kilobytes or so through at once after a pause.
_LARGE_BYTES = 256 << 10
_LEAST_LATENCY_S = 1e-7


def fit_link(samples: Sequence[tuple[int, float]]) -> Link:
    """The latency and rate that explain (bytes, seconds one way) best, by least squares of the relative error.

    Of repeated sizes the quickest counts: what made others slower was not the link. The rate comes from large messages
    where there are two sizes of them, else from the two largest there are, the latency from the smallest. Needs two
    sizes or more.
    """
    quickest: dict[int, float] = {}
    for size, seconds in samples:
        quickest[size] = min(seconds, quickest.get(size, seconds))
    if len(quickest) < 2:
        raise ValueError(f"a line needs two sizes or more, not {sorted(quickest)}")
    large = [size for size in quickest if size >= _LARGE_BYTES]
    counted = large if len(large) >= 2 else sorted(quickest)[-2:]
    _, per_byte = _line({size: quickest[size] for size in counted})
    least, most = min(quickest), max(quickest)
    if per_byte <= 0:  # so fast that noise hides it: the largest message bounds it
        per_byte = quickest[most] / most
    return Link(max(_LEAST_LATENCY_S, quickest[least] - least * per_byte), 1 / per_byte)


def _line(quickest: dict[int, float]) -> tuple[float, float]:
    sizes = np.array(list(quickest), np.float64)
    times = np.array(list(quickest.values()), np.float64)
    rows = np.stack([1 / times, sizes / times], axis=1)
    (latency, per_byte), *_ = np.linalg.lstsq(rows, np.ones(len(times)), rcond=None)
    return float(latency), float(per_byte)
