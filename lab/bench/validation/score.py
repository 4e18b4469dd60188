"""The quality of predictions: errors, rank correlation, regret and coverage of the 80% band."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from netfold_plan.step import Prediction


@dataclass(frozen=True)
class Case:
    """One measured quantity and its prediction, both in `unit`.

    low, high: the 80% band of the prediction.
    request: cases with the same request are alternatives; None: the case has no alternatives.
    """

    name: str
    unit: str
    measured: float
    predicted: float
    low: float
    high: float
    request: Hashable = None

    @property
    def error(self) -> float:
        """As a part of the measured value; above 0 where the prediction is too high."""
        return self.predicted / self.measured - 1


def step_case(name: str, measured_s: float, prediction: Prediction, request: Hashable = None) -> Case:
    return Case(name, "s", measured_s, prediction.step_s, prediction.low_s, prediction.high_s, request)


def banded_case(name: str, unit: str, measured: float, predicted: float, band: float) -> Case:
    """band: half of the band, as a part of the prediction."""
    return Case(name, unit, measured, predicted, predicted * (1 - band), predicted * (1 + band))


@dataclass(frozen=True)
class Score:
    """mean_error, worst_error: of absolute errors. bias: the mean of signed errors.

    rank_correlation: Spearman's, the mean over requests with at least three alternatives; None without any.
    regret: the mean over requests with at least two alternatives; None without any. The alternative with the shortest
    prediction takes (1 + regret) times as long as the fastest one.
    covered: the part of the cases that lie inside their bands.
    """

    rows: int
    mean_error: float
    bias: float
    worst_error: float
    rank_correlation: float | None
    regret: float | None
    covered: float


def score(cases: Sequence[Case]) -> Score:
    """Raises ValueError without cases."""
    if not cases:
        raise ValueError("there are no rows to compare")
    errors = np.array([case.error for case in cases])
    alternatives: dict[Hashable, list[Case]] = defaultdict(list)
    for case in cases:
        if case.request is not None:
            alternatives[case.request].append(case)
    correlations = [_spearman(group) for group in alternatives.values() if len(group) >= 3]
    regrets = [_regret(group) for group in alternatives.values() if len(group) >= 2]
    return Score(
        rows=len(cases),
        mean_error=float(np.abs(errors).mean()),
        bias=float(errors.mean()),
        worst_error=float(np.abs(errors).max()),
        rank_correlation=float(np.mean(correlations)) if correlations else None,
        regret=float(np.mean(regrets)) if regrets else None,
        covered=float(np.mean([case.low <= case.measured <= case.high for case in cases])),
    )


def _regret(group: list[Case]) -> float:
    chosen = min(group, key=lambda case: case.predicted)
    return chosen.measured / min(case.measured for case in group) - 1


def _spearman(group: list[Case]) -> float:
    measured, predicted = (_ranks([getattr(case, name) for case in group]) for name in ("measured", "predicted"))
    if measured.std() == 0 or predicted.std() == 0:
        return 0.0
    return float(np.corrcoef(measured, predicted)[0, 1])


def _ranks(values: list[float]) -> np.ndarray:
    """[n] ranks from 0; equal values share the mean of their ranks."""
    _, index, count = np.unique(values, return_inverse=True, return_counts=True)
    ranks: np.ndarray = (np.cumsum(count) - (count + 1) / 2)[index]
    return ranks
