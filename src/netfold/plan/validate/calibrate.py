"""Constants fitted to measured runs, held near what was known before: the most probable ones given both.

Gauss-Newton on the logarithms of constants and times, with a Huber weight so that a run that something else held up
does not bend all others. The prior of a constant is its present value, with a deviation; the fewer the runs, the more
it counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from netfold.plan.cluster import Cluster
from netfold.plan.job import Job
from netfold.plan.model import Model
from netfold.plan.step import FITTED, Constants, predict
from netfold.profile.columns import Floats

# What is known of each constant before any run is seen, and the deviation of its logarithm: of matmuls and memory much
# (NVIDIA's and others' measurements of A100), of hosts and frameworks little.
GUESSES = {
    "matmul_part": (0.85, 0.05),
    "matmul_depth": (190.0, 0.5),
    "unaligned_part": (0.27, 0.5),
    "memory_part": (0.7, 0.1),
    "launch_s": (43e-6, 0.5),
    "blend": (4.0, 0.3),
    "blend_talking": (2.0, 0.3),
    "update_bytes": (30.0, 0.5),
}
# The runs on one node are of 32 kinds of layer (width, tensor degree, microbatch); the rest repeats them.
_KINDS = 32
# Of a run's logarithm about the model with the best constants; errors beyond this many times it weigh less.
NOISE, _HUBER = 0.1, 1.5
_STEP, _ROUNDS, _DONE, _LARGEST = 0.02, 12, 0.003, 0.4


def fit_shipped(runs: Sequence[tuple[Model, Job, float]], cluster: Cluster, kinds: int = _KINDS) -> Constants:
    """The constants that netfold ships with, from the runs on one node. kinds: of layer, among the runs."""
    start = replace(FITTED, **{name: value for name, (value, _) in GUESSES.items()})
    priors = {name: deviation for name, (_, deviation) in GUESSES.items()}
    return fit(runs, cluster, start, priors, informative=kinds).constants


@dataclass(frozen=True)
class Fitted:
    """cost: how improbable runs and constants are together, as twice a negative logarithm, up to one number."""

    constants: Constants
    cost: float


def fit(
    runs: Sequence[tuple[Model, Job, float]],
    cluster: Cluster,
    constants: Constants,
    priors: dict[str, float],
    *,
    noise: float = NOISE,
    informative: int | None = None,
    alike: Floats | None = None,
) -> Fitted:
    """runs: model, job, measured seconds. priors: the deviation of each constant that may move.

    noise: of a run's logarithm about the best model. informative: as how many independent runs they count; all of them
    where None. alike: [n, n] correlations of what is left of runs, where some err together; none do where None.
    """
    names = list(priors)
    start = np.array([getattr(constants, name) for name in names])
    measured = np.log([seconds for _, _, seconds in runs])
    weight = (len(runs) if informative is None else informative) / len(runs) / noise**2
    apart = np.eye(len(runs)) if alike is None else np.linalg.inv(alike)
    stiff = 1 / np.array([priors[name] for name in names]) ** 2

    def moved(by: Floats) -> Constants:
        return replace(constants, **dict(zip(names, (start * np.exp(by)).tolist(), strict=True)))

    def errors(by: Floats) -> Floats:
        with_these = moved(by)
        found: Floats = np.log([predict(model, cluster, job, with_these).step_s for model, job, _ in runs]) - measured
        return found

    def bounded(left: Floats) -> tuple[Floats, Floats]:
        """Errors whose squares are Huber's, and their slopes: beyond some deviations an error pulls no more."""
        size = np.maximum(1, np.abs(left) / (_HUBER * noise))
        far = np.sqrt(2 * size - 1)
        return left * far / size, 1 / far

    def cost(by: Floats, left: Floats) -> float:
        held, _ = bounded(left)
        return float(weight * held @ apart @ held + (stiff * by**2).sum())

    by = np.zeros(len(names))
    left = errors(by)
    for _ in range(_ROUNDS):
        slopes = np.stack([(errors(by + _STEP * axis) - left) / _STEP for axis in np.eye(len(names))], axis=1)
        held, bends = bounded(left)
        pulls = weight * (bends[:, None] * slopes).T @ apart
        curvature = pulls @ (bends[:, None] * slopes) + np.diag(stiff)
        wanted = np.clip(-np.linalg.solve(curvature, pulls @ held + stiff * by), -_LARGEST, _LARGEST)
        before = cost(by, left)
        for part in (1.0, 0.5, 0.25, 0.125):
            there = errors(by + part * wanted)
            if cost(by + part * wanted, there) < before:
                break
        else:
            break
        by, left = by + part * wanted, there
        if np.abs(part * wanted).max() < _DONE:
            break
    return Fitted(moved(by), cost(by, left))
