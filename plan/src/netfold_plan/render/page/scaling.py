"""Curves over the number of devices: throughput against the ideal, and efficiency."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

from netfold import units
from netfold.page.chart import Axis, Chart
from netfold.page.escape import is_known, items
from netfold.page.table import Column, table
from netfold_plan.render.text import rate, time
from netfold_plan.result import Result
from netfold_plan.search import describe_split
from netfold_plan.variants.scaling_curve import ScalingPoint

_SCALING = {"strong": ("0", "strong: the batch stays"), "weak": ("1", "weak: the batch grows with the devices")}
_Curves = dict[str, list[ScalingPoint]]


def scaling(answer: Result) -> str:
    """Two charts of all curves, and a table for each curve."""
    fitting = {name: [point for point in points if point.choice] for name, points in answer.curves.items()}
    curves = {name: points for name, points in fitting.items() if len(points) > 1}
    figures = f'<div class="charts">{_throughput(curves)}{_efficiency(curves)}</div>' if curves else ""
    known = is_known(answer.best.prediction.mfu)
    return figures + "".join(_table(name, points, utilised=known) for name, points in answer.curves.items())


def _throughput(curves: _Curves) -> str:
    every = [point for points in curves.values() for point in points]
    first = min(every, key=attrgetter("devices"))
    ideal = sorted((point.devices, _rate(first) * point.devices / first.devices) for point in every)
    values = [_rate(point) for point in every] + [value for _, value in ideal]
    chart = Chart(_devices(every), Axis.holding("samples per second", min(values), max(values), rate, 10))
    chart.line("quiet", [ideal[0], ideal[-1]], "as many times as fast as there are devices", kind="dashed")
    return _drawn(chart, curves, _rate, "samples per second")


def _efficiency(curves: _Curves) -> str:
    every = [point for points in curves.values() for point in points]
    title = "throughput a device, against the fewest"
    chart = Chart(_devices(every), Axis(title, 0, 1.05, units.ratio))
    chart.level(1.0)
    return _drawn(chart, curves, attrgetter("efficiency"), title)


def _drawn(chart: Chart, curves: _Curves, value: Callable[[ScalingPoint], float], title: str) -> str:
    for name, points in curves.items():
        ink, label = _SCALING[name]
        chart.line(ink, [(point.devices, value(point)) for point in points], label, dots=True)
    labels = ", ".join(_SCALING[name][1] for name in curves)
    return chart.render(f"{title} by devices, {labels}; the tables below have the numbers")


def _devices(points: Sequence[ScalingPoint]) -> Axis:
    numbers = [point.devices for point in points]
    return Axis.holding("devices", min(numbers), max(numbers), units.count, 2)


def _rate(point: ScalingPoint) -> float:
    assert point.choice is not None
    return point.choice.prediction.samples_per_s


def _table(name: str, points: Sequence[ScalingPoint], *, utilised: bool) -> str:
    """utilised: whether the utilisation of the devices is known."""
    see = "see below"
    columns: list[Column[ScalingPoint]] = [
        Column("devices", "devices", units.count),
        Column("batch", "batch", units.count),
        Column("step", "choice.prediction.step_s", time, unknown=see),
        Column("samples/s", "choice.prediction.samples_per_s", rate, unknown=see),
        Column("efficiency", lambda point: point.efficiency if point.choice else None, units.ratio, unknown=see),
    ]
    if utilised:
        columns.append(Column("MFU", "choice.prediction.mfu", units.ratio, unknown=see))
    if any(point.training_s is not None for point in points):
        why = "the number of epochs at this batch is not given"
        columns.append(Column("training", "training_s", units.seconds, unknown=why))
    split = lambda point: None if point.choice is None else describe_split(point.choice.job)
    columns.append(Column("split", split, unknown=see, prose=True))
    shown = table(name, f"{_SCALING[name][1].capitalize()}.", columns, points)
    return shown + items((f"{point.devices:,} devices: {point.why}" for point in points if point.why), "notes")
