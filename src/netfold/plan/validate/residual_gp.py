"""What known runs say about runs like them: what is left of their errors once constants are fitted, carried over.

Libraries choose another kernel for another shape, so errors belong to a layer's shape: width, tensor degree and
microbatch. A Gaussian process over the logarithms of these (kriging; Rasmussen & Williams 2006, section 2.2) carries an
error to near shapes and lets it fade to none for others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from netfold.plan.validate.runs import Run
from netfold.profile.columns import Floats

# Deviation of errors that belong to a shape, and of a run about its shape's; logarithms. Of the runs on one node.
_SHAPES, _RUNS = 0.07, 0.03
# In doublings: of width, tensor degree and microbatch, where an error has faded by a factor of e^(1/2); of stages.
_REACH = (0.5, 0.5, 0.5, 4.0)


# An error beyond three deviations is a run's own, and not its shape's: somebody else used the network.
OUTLIER = 3 * float(np.hypot(_SHAPES, _RUNS))


class ResidualGP:
    """runs: with what was predicted of each, in the same unit as measured."""

    def __init__(self, runs: Sequence[Run], predicted_ms: Sequence[float]) -> None:
        self._known = _places(runs)
        left = np.log([run.measured_ms / found for run, found in zip(runs, predicted_ms, strict=True)])
        beyond = np.maximum(0.0, np.abs(left) - OUTLIER)
        spread = _alike(self._known, self._known) + np.diag(_RUNS**2 + beyond**2)
        self._spoken: Floats = np.asarray(np.linalg.inv(spread), dtype=np.float64)
        self._weights: Floats = np.asarray(self._spoken @ left, dtype=np.float64)

    def factors(self, runs: Sequence[Run]) -> list[float]:
        """What to multiply each prediction by."""
        found: list[float] = np.exp(_alike(_places(runs), self._known) @ self._weights).tolist()
        return found

    def doubts(self, runs: Sequence[Run]) -> list[float]:
        """Of each run, the deviation of its error, as a part of what it is where no run is like it."""
        near = _alike(_places(runs), self._known)
        told = np.einsum("ij,jk,ik->i", near, self._spoken, near)
        found: list[float] = np.sqrt(1 - np.clip(told, 0, _SHAPES**2) / (_SHAPES**2 + _RUNS**2)).tolist()
        return found


def similarity_key(run: Run) -> tuple[int, int, int]:
    """Width, tensor degree, microbatch: runs that have these in common have most of their error in common."""
    return run.model.hidden, run.job.split.tensor, run.job.micro_batch


def is_outlier(measured_ms: float, predicted_ms: float) -> bool:
    """Whether a run is further from what is predicted than shapes are."""
    return abs(float(np.log(measured_ms / predicted_ms))) > OUTLIER


def correlated(runs: Sequence[Run]) -> Floats:
    """[n, n] correlations of runs' errors: those of one shape err alike, and say hardly more than one of them."""
    places = _places(runs)
    found: Floats = (_alike(places, places) + _RUNS**2 * np.eye(len(runs))) / (_SHAPES**2 + _RUNS**2)
    return found


def _places(runs: Sequence[Run]) -> Floats:
    """[n, 4], in reaches."""
    shapes = [(*similarity_key(run), run.job.split.pipeline) for run in runs]
    places: Floats = np.log2(np.array(shapes, dtype=float).reshape(-1, len(_REACH))) / np.array(_REACH)
    return places


def _alike(some: Floats, others: Floats) -> Floats:
    """[n, m] covariances."""
    apart = ((some[:, None, :] - others[None, :, :]) ** 2).sum(axis=2)
    alike: Floats = _SHAPES**2 * np.exp(-apart / 2)
    return alike
