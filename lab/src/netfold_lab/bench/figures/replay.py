"""Training steps of known models, replayed by all backends in turn, for two figures."""

from netfold_lab.bench.config import Replay
from netfold_lab.bench.figures.budget import LEAST_ROUNDS, MOST_ROUNDS, Share
from netfold_lab.bench.figures.figure import GLOO, Measurements
from netfold_lab.bench.runner import BenchError, Runner
from netfold_lab.bench.step import measure_models
from netfold_plan.model.catalogue import find_model

NETFOLD = "netfold, with a switch"
BACKENDS = {NETFOLD: "netfold", GLOO: "gloo"}
# Steps of a backend outside of its rounds: connections, three times the timer alone, one warm-up.
_BESIDE = 5
# Estimate of a step with transfers over the step without transfers.
_LONGER = 1.6


def fitting_rounds(left_s: float, step_s: float) -> int:
    """The number of rounds of all backends that fit. step_s: of a step without transfers."""
    fit = int(left_s / (len(BACKENDS) * _LONGER * step_s)) - _BESIDE
    return max(LEAST_ROUNDS, min(MOST_ROUNDS, fit))


def replay(
    runner: Runner, share: Share, taken: Measurements, model: str, workers: int, *, shrink: int, speed: int
) -> None:
    """Measure a model's steps and add every round of every backend. Raises BenchError if a backend refuses.

    shrink: the tensors' size is divided by it. speed: the accelerator is that many times as fast.
    """
    rounds = fitting_rounds(share.left_s, find_model(model).compute_s / speed)
    asked = Replay([model], list(BACKENDS.values()), rounds=rounds, shrink=shrink, compute_scale=float(speed))
    for backend, row in zip(BACKENDS, measure_models(runner, asked), strict=True):
        if row.refused is not None:
            raise BenchError(f"{backend}, {model}: {row.refused}")
        for number, took_ns in enumerate(row.times_ns):
            taken.rows.append(
                {
                    "series": backend,
                    "x": model,
                    "workers": workers,
                    "round": number,
                    "took_s": took_ns / 1e9,
                    "compute_s": row.compute_ns / 1e9,
                    "wrong": (row.wrong or 0) if number == 0 else 0,
                }
            )
