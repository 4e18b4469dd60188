"""Fit the constants of the analytical model to measured runs, and carry what remains of their errors to similar runs.

`fit` finds the most probable constants given the runs and what was known before. It is Gauss-Newton on the logarithms
of constants and times, with a Huber weight, so that one disturbed run does not move the constants much. The prior of a
constant is its present value with a deviation: with few runs the prior dominates.

`ResidualGP` is a Gaussian process over the logarithms of a layer's shape (kriging; Rasmussen & Williams 2006, section
2.2). Libraries choose another kernel for another shape, so errors belong to width, tensor degree and microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from netfold.profile.columns import Floats
from netfold_plan.cluster import Cluster
from netfold_plan.job import Job
from netfold_plan.model import Model
from netfold_plan.step import FITTED, Constants, predict
from validation.runs import Run

# What is known of each constant before any run, and the deviation of its logarithm. NVIDIA's and others' measurements
# of A100 say much about matmuls and memory, and little about hosts and frameworks.
GUESSES = {
    "matmul_part": (0.85, 0.05),
    "matmul_depth": (190.0, 0.5),
    "unaligned_part": (0.27, 0.5),
    "memory_part": (0.7, 0.1),
    "launch_s": (43e-6, 0.5),
    "blend": (4.0, 0.3),
    "blend_collective": (2.0, 0.3),
    "update_bytes": (30.0, 0.5),
}
# The runs on one node have 32 kinds of layer (width, tensor degree, microbatch); all other runs repeat these.
_KINDS = 32
# The deviation of a run's logarithm from the best model. Errors above _HUBER deviations weigh less.
_NOISE, _HUBER = 0.1, 1.5
# Gauss-Newton on logarithms: the step of numeric slopes, the most rounds, the change at which it ends, and the largest
# change of a round.
_STEP, _ROUNDS, _DONE, _LARGEST = 0.02, 12, 0.003, 0.4
# Deviations of logarithms, from the runs on one node: between shapes, and between runs of one shape.
_SHAPES, _RUNS = 0.07, 0.03
# Doublings of width, tensor degree, microbatch and stages after which an error has faded by a factor of e^(1/2).
_REACH = (0.5, 0.5, 0.5, 4.0)
# An error beyond three deviations belongs to the run and not to its shape: something else used the network.
OUTLIER = 3 * float(np.hypot(_SHAPES, _RUNS))


@dataclass(frozen=True)
class Fitted:
    """cost: twice the negative log probability of runs and constants together, up to a constant."""

    constants: Constants
    cost: float


def fit_shipped(runs: Sequence[tuple[Model, Job, float]], cluster: Cluster, kinds: int = _KINDS) -> Constants:
    """The constants that netfold ships, from the runs on one node. kinds: kinds of layer among the runs."""
    start = replace(FITTED, **{name: value for name, (value, _) in GUESSES.items()})
    priors = {name: deviation for name, (_, deviation) in GUESSES.items()}
    return fit(runs, cluster, start, priors, noise=_NOISE, informative=kinds).constants


def fit(
    runs: Sequence[tuple[Model, Job, float]],
    cluster: Cluster,
    constants: Constants,
    priors: dict[str, float],
    *,
    noise: float,
    informative: int | None = None,
    correlations: Floats | None = None,
) -> Fitted:
    """runs: model, job, measured seconds. priors: the deviation of each constant that may move.

    noise: the deviation of a run's logarithm from the best model.
    informative: the number of independent runs that these are worth; None: all of them.
    correlations: [n, n], of the runs' errors; None: the errors are independent.
    """
    names = list(priors)
    start = np.array([getattr(constants, name) for name in names])
    measured = np.log([seconds for _, _, seconds in runs])
    weight = (len(runs) if informative is None else informative) / len(runs) / noise**2
    precision = np.eye(len(runs)) if correlations is None else np.linalg.inv(correlations)
    prior_precision = 1 / np.array([priors[name] for name in names]) ** 2

    def moved(by: Floats) -> Constants:
        return replace(constants, **dict(zip(names, (start * np.exp(by)).tolist(), strict=True)))

    def errors(by: Floats) -> Floats:
        with_these = moved(by)
        found: Floats = np.log([predict(model, cluster, job, with_these).step_s for model, job, _ in runs]) - measured
        return found

    def bounded(errors_now: Floats) -> tuple[Floats, Floats]:
        """Errors whose squares are Huber's, and their slopes."""
        size = np.maximum(1, np.abs(errors_now) / (_HUBER * noise))
        far = np.sqrt(2 * size - 1)
        return errors_now * far / size, 1 / far

    def cost(by: Floats, errors_now: Floats) -> float:
        bounded_errors, _ = bounded(errors_now)
        return float(weight * bounded_errors @ precision @ bounded_errors + (prior_precision * by**2).sum())

    by = np.zeros(len(names))
    errors_now = errors(by)
    for _ in range(_ROUNDS):
        slopes = np.stack([(errors(by + _STEP * axis) - errors_now) / _STEP for axis in np.eye(len(names))], axis=1)
        bounded_errors, huber_slopes = bounded(errors_now)
        gradient = weight * (huber_slopes[:, None] * slopes).T @ precision
        curvature = gradient @ (huber_slopes[:, None] * slopes) + np.diag(prior_precision)
        wanted = np.clip(
            -np.linalg.solve(curvature, gradient @ bounded_errors + prior_precision * by), -_LARGEST, _LARGEST
        )
        before = cost(by, errors_now)
        for part in (1.0, 0.5, 0.25, 0.125):
            there = errors(by + part * wanted)
            if cost(by + part * wanted, there) < before:
                break
        else:
            break
        by, errors_now = by + part * wanted, there
        if np.abs(part * wanted).max() < _DONE:
            break
    return Fitted(moved(by), cost(by, errors_now))


class ResidualGP:
    """runs: known runs. predicted_ms: their predictions."""

    def __init__(self, runs: Sequence[Run], predicted_ms: Sequence[float]) -> None:
        self._known = _places(runs)
        left = np.log([run.measured_ms / found for run, found in zip(runs, predicted_ms, strict=True)])
        beyond = np.maximum(0.0, np.abs(left) - OUTLIER)
        spread = _covariance(self._known, self._known) + np.diag(_RUNS**2 + beyond**2)
        self._precision: Floats = np.asarray(np.linalg.inv(spread), dtype=np.float64)
        self._weights: Floats = np.asarray(self._precision @ left, dtype=np.float64)

    def factors(self, runs: Sequence[Run]) -> list[float]:
        """The factor for the prediction of each run; 1 for a run that no known run is similar to."""
        found: list[float] = np.exp(_covariance(_places(runs), self._known) @ self._weights).tolist()
        return found

    def deviations(self, runs: Sequence[Run]) -> list[float]:
        """The deviation of each run's error, divided by the deviation without any known run."""
        covariance_with_known = _covariance(_places(runs), self._known)
        explained = np.einsum("ij,jk,ik->i", covariance_with_known, self._precision, covariance_with_known)
        found: list[float] = np.sqrt(1 - np.clip(explained, 0, _SHAPES**2) / (_SHAPES**2 + _RUNS**2)).tolist()
        return found


def shape(run: Run) -> tuple[int, int, int]:
    """Width, tensor degree, microbatch: runs with the same shape share most of their error."""
    return run.model.hidden, run.job.split.tensor, run.job.micro_batch


def correlations(runs: Sequence[Run]) -> Floats:
    """[n, n] correlations of the runs' errors. Ten runs of one shape say little more than one of them."""
    places = _places(runs)
    found: Floats = (_covariance(places, places) + _RUNS**2 * np.eye(len(runs))) / (_SHAPES**2 + _RUNS**2)
    return found


def _places(runs: Sequence[Run]) -> Floats:
    """[n, 4] logarithms of shape and stages, in units of _REACH."""
    shapes = [(*shape(run), run.job.split.pipeline) for run in runs]
    places: Floats = np.log2(np.array(shapes, dtype=float).reshape(-1, len(_REACH))) / np.array(_REACH)
    return places


def _covariance(some: Floats, others: Floats) -> Floats:
    """[n, m]."""
    apart = ((some[:, None, :] - others[None, :, :]) ** 2).sum(axis=2)
    found: Floats = _SHAPES**2 * np.exp(-apart / 2)
    return found
