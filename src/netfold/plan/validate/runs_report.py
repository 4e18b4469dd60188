"""Predictions beside measured runs: what `netfold plan validate --runs` says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import log
from typing import Any

from netfold.plan.cluster import Cluster
from netfold.plan.step import FITTED, Constants, Prediction, predict
from netfold.plan.validate.calibrate import Fitted, fit
from netfold.plan.validate.residual_gp import OUTLIER, ResidualGP, correlated, is_outlier, similarity_key
from netfold.plan.validate.runs import Run, recomputed
from netfold.plan.validate.score import Compared, Score, score

# With more the runs would be fitted and not foretold.
MOST_CALIBRATION_RUNS = 10
# What a target may differ in from what the constants were fitted on, with the deviation of its logarithm: how busy its
# hosts are, its network, its libraries, and all else.
_TARGET_PRIORS = {
    "matmul_part": 0.025,
    "memory_part": 0.03,
    "launch_s": 0.1,
    "network_part": 0.4,
    "send_bytes_per_s": 0.5,
    "tempo": 0.07,
}
# Of a run's logarithm: runs of one target err alike, which `tempo` has in it.
_NOISE = 0.08
_RECOMPUTATIONS = ("none", "full")
# By how much less improbable another answer than memory's must be to be taken for it: ten times as likely. One slow run
# could be noise.
_CLEARLY = 4.6
# Of the runs to calibrate with, those that something else held up, at most: where there are more, it is the target.
_HELD_UP = 0.25
# Shapes that can be left out one by one, at least; and to what part of themselves their errors have to come down.
_FEWEST_SHAPES, _NEARER = 3, 0.9
# Of a run about a model that was calibrated on its like; what the band is before any of them are seen, as so many runs.
_KNOWN_RUNS = 5
# From a mean absolute deviation to half of an 80% band, of errors that are normal: 1.2816 sqrt(pi/2).
_BAND = 1.606


@dataclass(frozen=True)
class Row:
    """factor: what runs like it, where there are some to calibrate with, say that its prediction lacks. doubt: how wide
    its band still is, as a part of one that no run is like."""

    run: Run
    prediction: Prediction
    recomputation: str
    factor: float = 1.0
    doubt: float = 1.0

    @property
    def predicted_ms(self) -> float:
        return self.prediction.step_s * self.factor * 1e3

    @property
    def band_ms(self) -> tuple[float, float]:
        aside_ms = (self.prediction.high_s - self.prediction.step_s) * self.doubt * self.factor * 1e3
        return self.predicted_ms - aside_ms, self.predicted_ms + aside_ms

    def compared(self) -> Compared:
        return Compared(self.run.request, self.run.measured_ms, self.predicted_ms, *self.band_ms)


@dataclass(frozen=True)
class Report:
    """calibrated: how many runs the constants were fitted to; 0 where they are those that ship.

    recomputation: of all runs, as their memory says, or those to calibrate with.
    """

    cluster: str
    rows: tuple[Row, ...]
    score: Score
    constants: Constants
    calibrated: int
    recomputation: str

    def to_json(self) -> dict[str, Any]:
        rows = []
        for row in self.rows:
            split = row.run.job.split
            rows.append(
                {
                    "line": row.run.line,
                    "gpus": row.run.gpus,
                    "model": row.run.model.name,
                    "global_batch": row.run.job.global_batch,
                    "micro_batch": row.run.job.micro_batch,
                    "tensor": split.tensor,
                    "data": split.data,
                    "pipeline": split.pipeline,
                    "recomputation": row.recomputation,
                    "measured": row.run.measured_ms,
                    "predicted": row.predicted_ms,
                    "low": row.band_ms[0],
                    "high": row.band_ms[1],
                    "limit": row.prediction.limit,
                }
            )
        return {
            "cluster": self.cluster,
            "calibrated": self.calibrated,
            "recomputation": self.recomputation,
            "score": asdict(self.score),
            "constants": asdict(self.constants),
            "rows": rows,
        }


def validate(runs: Sequence[Run], cluster: Cluster, calibration: Sequence[Run] = ()) -> Report:
    """calibration: of the same target, at most MOST_CALIBRATION_RUNS; a few constants are fitted to them.

    Raises ValueError, in a sentence, for more, and for a run that the cluster cannot have.
    """
    if len(calibration) > MOST_CALIBRATION_RUNS:
        raise ValueError(
            f"{len(calibration)} runs to calibrate with are more than {MOST_CALIBRATION_RUNS}: with so many the rest "
            "would be fitted and not foretold; take fewer"
        )
    constants, recomputation = FITTED, recomputed([*runs, *calibration], cluster)
    if calibration:
        constants, recomputation = calibrated(calibration, cluster, recomputation)
    rows = [_row(run, cluster, constants, recomputation) for run in runs]
    if calibration:
        known = [_row(run, cluster, constants, recomputation).predicted_ms for run in calibration]
        likeness = ResidualGP(calibration, known)
        told = zip(rows, likeness.factors(runs), likeness.doubts(runs), strict=True)
        rows = [replace(row, factor=factor, doubt=doubt) for row, factor, doubt in told]
    found = score([row.compared() for row in rows])
    return Report(cluster.name, tuple(rows), found, constants, len(calibration), recomputation)


def _row(run: Run, cluster: Cluster, constants: Constants, recomputation: str) -> Row:
    """recomputation: of runs of its kind; one that does not fit without it needs it whatever they do."""
    job = replace(run.job, recomputation="full" if recomputation == "full" else recomputed([run], cluster))
    return Row(run, predict(run.model, cluster, job, constants), job.recomputation)


def _fitted(runs: Sequence[Run], cluster: Cluster, recomputation: str, constants: Constants) -> Fitted:
    told = [(run.model, replace(run.job, recomputation=recomputation), run.measured_ms / 1e3) for run in runs]
    return fit(told, cluster, constants, _TARGET_PRIORS, noise=_NOISE, alike=correlated(runs))


def _helps(runs: Sequence[Run], cluster: Cluster, recomputation: str, constants: Constants) -> bool:
    """Whether constants that are fitted to all shapes but one bring that one nearer. Fewer than three cannot say."""
    shapes = {similarity_key(run) for run in runs}
    if len(shapes) < _FEWEST_SHAPES:
        return True
    before = after = 0.0
    for shape in shapes:
        fitted = _fitted(
            [run for run in runs if similarity_key(run) != shape], cluster, recomputation, constants
        ).constants
        for run in (run for run in runs if similarity_key(run) == shape):
            before += _off(run, cluster, recomputation, constants)
            after += _off(run, cluster, recomputation, fitted)
    return after <= _NEARER * before


def _off(run: Run, cluster: Cluster, recomputation: str, constants: Constants) -> float:
    """An error, of which no more is counted than of a run that was not held up."""
    return min(OUTLIER, abs(log(_row(run, cluster, constants, recomputation).predicted_ms / run.measured_ms)))


def calibrated(
    runs: Sequence[Run], cluster: Cluster, likely: str, constants: Constants = FITTED
) -> tuple[Constants, str]:
    """Constants for a target of which these runs are known, and what it recomputes.

    What is recomputed is no matter of degree, so each answer is tried; the likely one stays unless another is clearly
    nearer. Constants stay where fitting does not help shapes that were not fitted.
    """
    tried = {word: _fitted(runs, cluster, word, constants) for word in _RECOMPUTATIONS}
    best = min(tried, key=lambda word: tried[word].cost)
    if tried[likely].cost <= tried[best].cost + _CLEARLY:
        best = likely
    fitted = tried[best].constants
    plain = [run for run in runs if not is_outlier(run.measured_ms, _row(run, cluster, fitted, best).predicted_ms)]
    if (1 - _HELD_UP) * len(runs) <= len(plain) < len(runs):
        fitted = _fitted(plain, cluster, best, constants).constants
    if not _helps(runs, cluster, best, constants):
        fitted = constants
    off = [abs(_row(run, cluster, fitted, best).predicted_ms / run.measured_ms - 1) for run in runs]
    known = (_KNOWN_RUNS * constants.spread + _BAND * sum(off)) / (_KNOWN_RUNS + len(runs))
    return replace(fitted, spread=known), best
