"""How good predictions are, by four numbers. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from netfold.profile.columns import Floats


@dataclass(frozen=True)
class Compared:
    """One measured quantity and its prediction, in any one unit. question: those that share it are
    alternatives; None: it has none."""

    request: Hashable
    measured: float
    predicted: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """Of the measured one; above 0 where too much was predicted."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Score:
    """mean_error: of all rows, absolute; bias: signed. worst_error: absolute.

    rank_correlation: Spearman's, mean over questions of three alternatives and more; regret: how much longer the
    alternative takes that was predicted to be the fastest than the fastest, mean over questions of two and more; None
    where there are none. covered: rows inside their band.
    """

    rows: int
    mean_error: float
    bias: float
    worst_error: float
    rank_correlation: float | None
    regret: float | None
    covered: float


def score(rows: Sequence[Compared]) -> Score:
    """Raises ValueError where there are no rows."""
    if not rows:
        raise ValueError("there is nothing to compare: no rows")
    errors = np.array([row.error for row in rows])
    asked: dict[Hashable, list[Compared]] = defaultdict(list)
    for row in rows:
        if row.request is not None:
            asked[row.request].append(row)
    correlations = [_spearman(group) for group in asked.values() if len(group) >= 3]
    regrets = [_regret(group) for group in asked.values() if len(group) >= 2]
    return Score(
        rows=len(rows),
        mean_error=float(np.abs(errors).mean()),
        bias=float(errors.mean()),
        worst_error=float(np.abs(errors).max()),
        rank_correlation=float(np.mean(correlations)) if correlations else None,
        regret=float(np.mean(regrets)) if regrets else None,
        covered=float(np.mean([row.low <= row.measured <= row.high for row in rows])),
    )


def _regret(group: list[Compared]) -> float:
    chosen = min(group, key=lambda row: row.predicted)
    return chosen.measured / min(row.measured for row in group) - 1


def _spearman(group: list[Compared]) -> float:
    measured = _ranks(np.array([row.measured for row in group]))
    predicted = _ranks(np.array([row.predicted for row in group]))
    if measured.std() == 0 or predicted.std() == 0:
        return 0.0
    return float(np.corrcoef(measured, predicted)[0, 1])


def _ranks(values: Floats) -> Floats:
    """[n] places, from 0; equal values share the mean of theirs."""
    _, index, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count) - 1.0
    shared: Floats = (last - (count - 1) / 2)[index]
    return shared
