"""Cut a chain of unequal layers into runs, one for each stage of a pipeline."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from functools import lru_cache

# Halvings of the interval that contains the largest run's cost. The rest, with rounding, is a smaller part of the cost.
_HALVINGS, _ROUNDING = 50, 1e-9


@lru_cache(maxsize=4096)
def cut(costs: tuple[float, ...], runs: int) -> tuple[int, ...]:
    """Indices where each run begins, and the end: runs + 1 of them. Each run has at least one layer.

    costs: of each layer, at least 0. The largest run costs as little as possible. Among such cuts each run is as near
    as possible to an even share of the layers that remain. `netfold train` uses the same rule
    (train/parallel/stages.py).
    Cost: 50 passes over the runs. Raises ValueError where there are fewer layers than runs.
    """
    if runs > len(costs):
        raise ValueError(f"{runs} pipeline stages are more than the {len(costs)} layers; use at most {len(costs)}")
    before = list(itertools.accumulate(costs, initial=0.0))
    low, high = max(before[-1] / runs, *costs), before[-1]
    if _farthest(before, runs, low) is not None:
        high = low
    for _ in range(_HALVINGS):
        if high <= low:
            break
        middle = (low + high) / 2
        if _farthest(before, runs, middle) is None:
            low = middle
        else:
            high = middle
    high *= 1 + _ROUNDING
    # A run must not end before the runs after it could hold all remaining layers.
    backwards = [before[-1] - each for each in reversed(before)]
    least = _farthest(backwards, runs, high)
    assert least is not None, "a limit that held forwards holds backwards"
    bounds = [0]
    for run in range(1, runs):
        even = before[bounds[-1]] + (before[-1] - before[bounds[-1]]) / (runs - run + 1)
        nearest = min(bisect_left(before, even), len(costs))
        if nearest > 0 and even - before[nearest - 1] < before[nearest] - even:
            nearest -= 1
        first = max(bounds[-1] + 1, len(costs) - least[runs - run])
        last = min(_reach(before, bounds[-1], high), len(costs) - (runs - run))
        bounds.append(max(first, min(nearest, last)))
    return (*bounds, len(costs))


def _reach(before: list[float], start: int, limit: float) -> int:
    """The last index up to which layers from `start` cost no more than `limit`."""
    return bisect_right(before, before[start] + limit) - 1


def _farthest(before: list[float], runs: int, limit: float) -> list[int] | None:
    """Ends of runs that are as long as `limit` allows and leave a layer for each later run; None if layers remain."""
    bounds, last = [0], len(before) - 1
    for run in range(1, runs + 1):
        end = min(_reach(before, bounds[-1], limit), last - (runs - run))
        if end == bounds[-1]:
            return None
        bounds.append(end)
    return bounds if bounds[-1] == last else None
