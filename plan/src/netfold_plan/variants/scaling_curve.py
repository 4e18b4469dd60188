"""Scaling of a job: the best step for each number of devices, with the same batch (strong) or a growing one (weak)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from netfold_plan.cluster import Cluster
from netfold_plan.job import Job
from netfold_plan.model import Model
from netfold_plan.search import PredictedJob, Space, search
from netfold_plan.training import TrainingLength

# The batch of a point: the job's, or as many samples per device as the job has.
SCALINGS = ("strong", "weak")


@dataclass(frozen=True)
class ScalingPoint:
    """batch: samples of a step. choice: None where no split divides evenly or fits, and then `why` has the reason.

    efficiency: throughput per device, over that of the curve's first point.
    training_s: of the whole training; None where its length at this batch is unknown.
    """

    devices: int
    batch: int
    choice: PredictedJob | None
    why: str = ""
    efficiency: float = 0.0
    training_s: float | None = None


def parse_range(text: str) -> tuple[int, ...]:
    """`8..1024`: doubling, up to and including the end; `8,24,96`: these. Raises ValueError for any other text."""
    wrong = ValueError(f"--curve {text}: write a doubling range, such as 8..1024, or numbers: 8,24,96")
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
    """One point per size. devices: the number of devices that the job's batch is meant for.

    The free part of the split is chosen for each size. Where the whole mesh is fixed, data-parallel ranks are added.
    """
    free = replace(space, data=None)
    points = [_point(model, cluster, job, free, size, _batch(job, devices, size, scaling)) for size in sizes]
    first = next((point for point in points if point.choice is not None), None)
    if first is None:
        return tuple(points)
    base, length = _device_rate(first), training or TrainingLength()
    return tuple(
        replace(
            point,
            efficiency=_device_rate(point) / base,
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


def _device_rate(point: ScalingPoint) -> float:
    assert point.choice is not None
    return point.choice.prediction.samples_per_s / point.devices
