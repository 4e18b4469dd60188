"""Predictions of a table of measured steps, by shipped constants or by constants calibrated on a few of the runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log

from netfold_plan.cluster import Cluster
from netfold_plan.step import FITTED, Constants, predict
from validation.calibrate import OUTLIER, Fitted, ResidualGP, correlations, fit, shape
from validation.runs import Run, recomputed
from validation.score import Case, Score, score, step_case

# With more runs their errors would be fitted and not predicted.
MOST_CALIBRATION_RUNS = 10
# What may differ between a target and the runs that the constants were fitted to, each with the deviation of its
# logarithm: the load of the hosts, the network, the libraries and everything else.
_TARGET_PRIORS = {
    "matmul_part": 0.025,
    "memory_part": 0.03,
    "launch_s": 0.1,
    "network_part": 0.4,
    "send_bytes_per_s": 0.5,
    "layer_factor": 0.07,
}
# The deviation of a run's logarithm. The error that runs of one target share is in `layer_factor`.
_NOISE = 0.08
_RECOMPUTATIONS = ("none", "full")
# The setting that memory suggests is kept unless the fit of another one costs this much less (ten times the
# likelihood): one slow run could be noise.
_COST_MARGIN = 4.6
# At most this part of the calibration runs counts as disturbed; with more outliers the target itself is slow.
_DISTURBED = 0.25
# The fewest shapes that can be left out one by one, and the factor by which their errors have to shrink.
_FEWEST_SHAPES, _NEARER = 3, 0.9
# The shipped band counts as this many runs beside the calibration runs.
_KNOWN_RUNS = 5
# From a mean absolute deviation to half of an 80% band, for normal errors: 1.2816 sqrt(pi/2).
_BAND = 1.606


@dataclass(frozen=True)
class Report:
    """cases: one per run, in ms. calibrated: how many runs the constants were fitted to; 0: shipped constants.

    recomputation: of all runs, by their memory or by the calibration runs.
    """

    cluster: str
    cases: tuple[Case, ...]
    score: Score
    constants: Constants
    calibrated: int
    recomputation: str


def validate(runs: Sequence[Run], cluster: Cluster, calibration: Sequence[Run] = ()) -> Report:
    """Predict every run. calibration: at most MOST_CALIBRATION_RUNS runs of the same target, to fit constants to.

    Raises ValueError for more calibration runs, and for a run that the cluster cannot have.
    """
    if len(calibration) > MOST_CALIBRATION_RUNS:
        raise ValueError(
            f"{len(calibration)} calibration runs are more than {MOST_CALIBRATION_RUNS}: their errors would be fitted "
            "and not predicted; give fewer"
        )
    constants, recomputation = FITTED, recomputed([*runs, *calibration], cluster)
    factors, widths = [1.0] * len(runs), [1.0] * len(runs)
    if calibration:
        constants, recomputation = calibrated(calibration, cluster, recomputation)
        known = [_case(run, cluster, constants, recomputation).predicted for run in calibration]
        residual = ResidualGP(calibration, known)
        factors, widths = residual.factors(runs), residual.deviations(runs)
    cases = [
        _case(run, cluster, constants, recomputation, *more) for run, *more in zip(runs, factors, widths, strict=True)
    ]
    return Report(cluster.name, tuple(cases), score(cases), constants, len(calibration), recomputation)


def calibrated(
    runs: Sequence[Run], cluster: Cluster, likely: str, constants: Constants = FITTED
) -> tuple[Constants, str]:
    """Fit constants to a target's runs, and decide what the target recomputes.

    Both answers about recomputation are tried; `likely` stands unless the other one is clearly nearer. The constants
    stay as they are where the fit does not help shapes that were left out of the fit.
    """
    tried = {what: _fit(runs, cluster, what, constants) for what in _RECOMPUTATIONS}
    best = min(tried, key=lambda what: tried[what].cost)
    if tried[likely].cost <= tried[best].cost + _COST_MARGIN:
        best = likely
    fitted = tried[best].constants
    plain = [run for run in runs if _off(run, cluster, best, fitted) <= OUTLIER]
    if (1 - _DISTURBED) * len(runs) <= len(plain) < len(runs):
        fitted = _fit(plain, cluster, best, constants).constants
    if not _fit_helps(runs, cluster, best, constants):
        fitted = constants
    off = [abs(_case(run, cluster, fitted, best).error) for run in runs]
    spread = (_KNOWN_RUNS * constants.spread + _BAND * sum(off)) / (_KNOWN_RUNS + len(runs))
    return replace(fitted, spread=spread), best


def _case(
    run: Run, cluster: Cluster, constants: Constants, recomputation: str, factor: float = 1.0, width: float = 1.0
) -> Case:
    """In ms. recomputation: of the table; a run that does not fit without recomputation is recomputed in any case.

    factor: by which similar runs correct the prediction. width: of the band, as a part of the full band.
    """
    job = replace(run.job, recomputation="full" if recomputation == "full" else recomputed([run], cluster))
    case = step_case(f"line {run.line}, {run.model.name}", run.measured_ms, predict(run.model, cluster, job, constants))
    middle, half = 1e3 * factor * case.predicted, 1e3 * factor * width * (case.high - case.predicted)
    return Case(case.name, "ms", case.measured, middle, middle - half, middle + half, run.request)


def _fit(runs: Sequence[Run], cluster: Cluster, recomputation: str, constants: Constants) -> Fitted:
    measured = [(run.model, replace(run.job, recomputation=recomputation), run.measured_s) for run in runs]
    return fit(measured, cluster, constants, _TARGET_PRIORS, noise=_NOISE, correlations=correlations(runs))


def _fit_helps(runs: Sequence[Run], cluster: Cluster, recomputation: str, constants: Constants) -> bool:
    """Whether constants fitted to all shapes but one bring that shape nearer. With fewer than three shapes: True."""
    shapes = {shape(run) for run in runs}
    if len(shapes) < _FEWEST_SHAPES:
        return True
    before = after = 0.0
    for left_out in shapes:
        others = [run for run in runs if shape(run) != left_out]
        fitted = _fit(others, cluster, recomputation, constants).constants
        for run in (run for run in runs if shape(run) == left_out):
            # An outlier's error counts as much as the largest plain one.
            before += min(OUTLIER, _off(run, cluster, recomputation, constants))
            after += min(OUTLIER, _off(run, cluster, recomputation, fitted))
    return after <= _NEARER * before


def _off(run: Run, cluster: Cluster, recomputation: str, constants: Constants) -> float:
    """The absolute logarithm of predicted over measured."""
    case = _case(run, cluster, constants, recomputation)
    return abs(log(case.predicted / case.measured))


def runs_markdown(report: Report) -> str:
    """A row per run, then one sentence of scores."""
    lines = [f"# Measured steps on {report.cluster}, predicted", ""]
    lines += ["| | measured | predicted | from | to | error |", "|---|---:|---:|---:|---:|---:|"]
    for case in report.cases:
        numbers = " | ".join(f"{value:.1f} ms" for value in (case.measured, case.predicted, case.low, case.high))
        lines.append(f"| {case.name} | {numbers} | {100 * case.error:+.1f}% |")
    found = report.score
    said = f"{found.rows} runs: mean absolute error {100 * found.mean_error:.1f}% (bias {100 * found.bias:+.1f}%)"
    if found.rank_correlation is not None:
        said += f", rank correlation within a model {found.rank_correlation:.3f}"
    if found.regret is not None:
        said += f", the predicted best split takes {100 * found.regret:.1f}% longer than the best"
    lines += ["", f"{said}, {100 * found.covered:.0f}% in the 80% band. Recomputation: {report.recomputation}."]
    if report.calibrated:
        lines.append(f"The constants were fitted to {report.calibrated} runs.")
    return "\n".join(lines) + "\n"
