"""How a job scales: the best step at each number of devices, the batch staying (strong) or growing with them (weak)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from netfold.plan.cluster import Cluster
from netfold.plan.job import Job
from netfold.plan.model import Model
from netfold.plan.search import Choice, Space, search
from netfold.plan.training_length import TrainingLength

# The batch that a point is measured by: the job's, or as many samples a device as the job has.
SCALINGS = ("strong", "weak")


@dataclass(frozen=True)
class ScalingPoint:
    """batch: samples of a step. choice: None where no way comes out even or fits, and then `why` says so.

    efficiency: throughput a device, against that of the curve's first point. training_s: of the whole training; None
    where its length at this batch is not known.
    """

    devices: int
    batch: int
    choice: Choice | None
    why: str = ""
    efficiency: float = 0.0
    training_s: float | None = None


def parse_range(text: str) -> tuple[int, ...]:
    """`8..1024`: doubling, the end included; `8,24,96`: these. Raises ValueError for anything else."""
    wrong = ValueError(f"--curve {text}: write a range that is doubled, such as 8..1024, or numbers: 8,24,96")
    low, dots, high = text.partition("..")
    try:
        numbers = sorted({int(each) for each in text.split(",")}) if not dots else _doubled(int(low), int(high))
    except ValueError:
        raise wrong from None
    if not numbers or numbers[0] < 1:
        raise wrong
    return tuple(numbers)


def scaling_curve(
    model: Model,
    cluster: Cluster,
    job: Job,
    space: Space,
    *,
    devices: int,
    sizes: Sequence[int],
    scaling: str,
    training: TrainingLength | None = None,
) -> tuple[ScalingPoint, ...]:
    """A point a size. devices: that the job's batch is meant for.

    What `space` leaves free is chosen anew at each size; where all of a mesh is fixed, it is the number of
    data-parallel ranks that grows.
    """
    free = replace(space, data=None)
    points = [_point(model, cluster, job, free, size, _batch(job, devices, size, scaling)) for size in sizes]
    first = next((point for point in points if point.choice is not None), None)
    if first is None:
        return tuple(points)
    base, length = _each(first), training or TrainingLength()
    return tuple(
        replace(
            point,
            efficiency=_each(point) / base,
            training_s=length.seconds(point.batch, point.choice.prediction.samples_per_s),
        )
        if point.choice
        else point
        for point in points
    )


def _doubled(low: int, high: int) -> list[int]:
    numbers = []
    while 0 < low < high:
        numbers.append(low)
        low *= 2
    return [*numbers, high] if low > 0 and numbers else []


def _batch(job: Job, devices: int, size: int, scaling: str) -> int:
    return job.global_batch if scaling == "strong" else max(1, job.global_batch * size // devices)


def _point(model: Model, cluster: Cluster, job: Job, space: Space, size: int, batch: int) -> ScalingPoint:
    try:
        best = search(model, cluster, size, replace(job, global_batch=batch, micro_batch=1), space).best
    except ValueError as error:
        return ScalingPoint(size, batch, None, str(error))
    return ScalingPoint(size, batch, best)


def _each(point: ScalingPoint) -> float:
    assert point.choice is not None
    return point.choice.prediction.samples_per_s / point.devices
