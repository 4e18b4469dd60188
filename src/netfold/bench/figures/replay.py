"""What the two figures of training share: steps of a known model, replayed by all backends in turn, as rounds."""

from collections.abc import Sequence

from netfold.bench.config import Replay
from netfold.bench.figures.budget import LEAST_ROUNDS, MOST_ROUNDS, Share
from netfold.bench.figures.figure import GLOO, Measurements
from netfold.bench.runner import BenchError, Runner
from netfold.bench.step import StepRow, measure_models
from netfold.plan.model.catalogue import find_model

NETFOLD = "netfold, with a switch"
BACKENDS = {NETFOLD: "netfold", GLOO: "gloo"}
# Beside its rounds a backend plays so many steps: connections, the timer alone three times, one to warm up.
_BESIDE = 5
# A step with its transfers, of the step without them, as a guess at what fits.
_LONGER = 1.6


def fitting_rounds(left_s: float, step_s: float) -> int:
    """How many rounds of all backends fit into what is left, where a step without transfers takes step_s."""
    fit = int(left_s / (len(BACKENDS) * _LONGER * step_s)) - _BESIDE
    return max(LEAST_ROUNDS, min(MOST_ROUNDS, fit))


def replay(runner: Runner, share: Share, model: str, *, shrink: int, compute_scale: int) -> Sequence[StepRow]:
    """A row a backend, in the order of BACKENDS."""
    rounds = fitting_rounds(share.left_s, find_model(model).compute_s / compute_scale)
    asked = Replay([model], list(BACKENDS.values()), rounds=rounds, shrink=shrink, compute_scale=float(compute_scale))
    return measure_models(runner, asked)


def keep(taken: Measurements, model: str, workers: int, rows: Sequence[StepRow]) -> None:
    """Every round of every backend, with what the step takes without transfers, in seconds. Raises
    BenchError where a backend refuses."""
    for backend, row in zip(BACKENDS, rows, strict=True):
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


def note(taken: Measurements, runner: Runner) -> None:
    described = runner.describe()
    control = described["machine"]["tcp_congestion_control"]
    taken.circumstances |= {"versions": runner.versions, "tcp_congestion_control": control}
