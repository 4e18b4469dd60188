"""Curves over the number of devices: throughput against the ideal, and efficiency."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from netfold.plan.render.text import duration, rate, time, utilisation_is_known
from netfold.plan.result import Result
from netfold.plan.scaling_curve import ScalingPoint
from netfold.plan.search import Choice, describe_split
from netfold.profile.page import units
from netfold.profile.page.chart import SIDE, Axis, chart
from netfold.profile.page.escape import escape
from netfold.profile.page.table import Column, table

_SAID = {"strong": "strong: the batch stays", "weak": "weak: the batch grows with the devices"}


def scaling(answer: Result) -> str:
    curves = {name: [point for point in points if point.choice] for name, points in answer.curves.items()}
    drawn = {name: points for name, points in curves.items() if len(points) > 1}
    figures = f'<div class="charts">{_throughput(drawn)}{_efficiency(drawn)}</div>' if drawn else ""
    known = utilisation_is_known(answer)
    return figures + "".join(_table(name, points, utilised=known) for name, points in answer.curves.items())


def _throughput(curves: dict[str, list[ScalingPoint]]) -> str:
    every = [point for points in curves.values() for point in points]
    across = _devices(every)
    first = min(every, key=lambda point: point.devices)
    ideal = [(point.devices, _rate(first) * point.devices / first.devices) for point in every]
    values = [_rate(point) for point in every] + [value for _, value in ideal]
    up = Axis.holding("samples a second", min(values), max(values), rate, 10)
    straight = [min(ideal), max(ideal)]
    marks = f'<path class="ideal" d="{_line(straight, across, up)}"/>'
    return _figure(curves, across, up, _rate, marks, "as many times as fast as there are devices")


def _efficiency(curves: dict[str, list[ScalingPoint]]) -> str:
    every = [point for points in curves.values() for point in points]
    across, up = _devices(every), Axis("throughput a device, against the fewest", 0, 1.05, units.ratio)
    at = SIDE - up.at(1.0)
    marks = f'<line class="level" x1="0" x2="{SIDE}" y1="{at:.1f}" y2="{at:.1f}"/>'
    return _figure(curves, across, up, lambda point: point.efficiency, marks, "")


def _figure(
    curves: dict[str, list[ScalingPoint]],
    across: Axis,
    up: Axis,
    value: Callable[[ScalingPoint], float],
    marks: str,
    ideal: str,
) -> str:
    for name, points in curves.items():
        line = [(point.devices, value(point)) for point in points]
        marks += f'<path class="{name}" d="{_line(line, across, up)}"/>'
        marks += "".join(f'<path class="{name} dot" d="{_line([each], across, up)}h0"/>' for each in line)
    keys = {name: _SAID[name] for name in curves} | ({"ideal": ideal} if ideal else {})
    legend = "".join(f'<span><i class="{name}"></i>{escape(text)}</span>' for name, text in keys.items())
    said = f"{up.title} by devices, {', '.join(keys.values())}; the tables below have the numbers"
    return f'<figure>{chart(marks, across, up, said=said)}<div class="legend">{legend}</div></figure>'


def _devices(points: Sequence[ScalingPoint]) -> Axis:
    numbers = [point.devices for point in points]
    return Axis.holding("devices", min(numbers), max(numbers), units.count, 2)


def _line(points: Sequence[tuple[int, float]], across: Axis, up: Axis) -> str:
    return "M" + " L".join(f"{across.at(x):.1f},{SIDE - up.at(y):.1f}" for x, y in points)


def _rate(point: ScalingPoint) -> float:
    assert point.choice is not None
    return point.choice.prediction.samples_per_s


_TRAINING: Column[ScalingPoint] = Column(
    "training", lambda point: point.training_s, duration, unknown="how many epochs it takes at this batch is not said"
)


def _table(name: str, points: Sequence[ScalingPoint], *, utilised: bool) -> str:
    """utilised: what part of the devices' peak is used is known."""
    why = "see below"

    def found(value: Callable[[Choice], Any]) -> Callable[[ScalingPoint], Any]:
        return lambda point: None if point.choice is None else value(point.choice)

    columns: tuple[Column[ScalingPoint], ...] = (
        Column("devices", lambda point: point.devices, units.count),
        Column("batch", lambda point: point.batch, units.count),
        Column("step", found(lambda choice: choice.prediction.step_s), time, unknown=why),
        Column("samples/s", found(lambda choice: choice.prediction.samples_per_s), rate, unknown=why),
        Column("efficiency", lambda point: point.efficiency if point.choice else None, units.ratio, unknown=why),
        *([Column("MFU", found(lambda choice: choice.prediction.mfu), units.ratio, unknown=why)] if utilised else []),
        *([_TRAINING] if any(point.training_s is not None for point in points) else []),
        Column("split", found(lambda choice: describe_split(choice.job)), unknown=why),
    )
    notes = "".join(f"<li>{point.devices:,} devices: {escape(point.why)}</li>" for point in points if point.why)
    shown = table(name, f"{_SAID[name].capitalize()}.", columns, points)
    return shown + (f'<ul class="notes">{notes}</ul>' if notes else "")
