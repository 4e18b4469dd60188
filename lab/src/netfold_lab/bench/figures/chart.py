"""The three kinds of charts: lines with their spread, rows of points, points in a plane.

Spreads are bars from the 5th to the 95th percentile. A series has the same colour and shape in every chart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from netfold import units
from netfold.page.chart import Axis, Chart
from netfold_lab.bench.spread import Spread

# The colour and shape of a series, by the first prefix of its name that fits; otherwise by its number.
_INKS = {
    "netfold, in the network": "1",
    "netfold, a leaf": "1",
    "netfold, with a switch": "1",
    "gloo, TCP cubic": "2",
    "gloo": "0",
    "MPI": "2",
    "netfold": "3",
}
_OTHERS = "1302"
# Between the lines of neighbouring series, in SVG units: otherwise the bars at one x would hide each other.
_ASIDE = 5


@dataclass(frozen=True)
class Line:
    """A series. spreads: of each x. values: in place of spreads, for one of at most two limits."""

    label: str
    xs: Sequence[float]
    spreads: Sequence[Spread] = ()
    values: Sequence[float] = ()


def lines(
    panels: Mapping[str, Sequence[Line]],
    *,
    name: str,
    x_label: str,
    y_label: str,
    x_log: bool = False,
    y_log: bool = False,
    y_from: float = 0,
    ticks: Mapping[float, str] | None = None,
) -> str:
    """Charts side by side with one y axis, by title. ticks: of x; None: a tick at each x."""
    every = [line for panel in panels.values() for line in panel]
    low = min(of.p5 for line in every for of in line.spreads)
    high = max(value for line in every for value in (*(of.p95 for of in line.spreads), *line.values))
    named = ticks or {x: f"{x:g}" for x in sorted({x for line in every for x in line.xs})}
    least, most = min(named), max(named)
    # The margin left and right of the first and the last x.
    if x_log:
        margin = max(most / least, 2) ** 0.04
        across = Axis(x_label, least / margin, most * margin, base=2, named=named)
    else:
        margin = 0.04 * max(most - least, 1)
        across = Axis(x_label, least - margin, most + margin, named=named)
    drawn = ""
    for title, panel in panels.items():
        up_title = f"{y_label} · {title}" if title else y_label
        up = Axis(up_title, low / 1.15, high * 1.15, units.digits, base=10)
        if not y_log:
            up = Axis(up_title, y_from, high + 0.05 * (high - y_from), units.digits)
        chart = Chart(across, up)
        measured = [line for line in panel if line.spreads]
        limits = [line for line in panel if line.values]
        for line, kind in zip(limits, ("dashed", "dotted"), strict=False):
            chart.line("quiet", list(zip(line.xs, line.values, strict=True)), line.label, kind=kind)
        for number, line in enumerate(measured):
            ink, aside = _ink(line.label, number), _ASIDE * (number - (len(measured) - 1) / 2)
            medians = [(x, of.median) for x, of in zip(line.xs, line.spreads, strict=True)]
            chart.line(ink, medians, line.label, dots=True, aside=aside)
            for x, of in zip(line.xs, line.spreads, strict=True):
                chart.span(ink, (x, of.p5), (x, of.p95), aside=aside)
        drawn += chart.render(f"{name}: {up_title}", height_rem=18)
    return f'<div class="charts">{drawn}</div>' if len(panels) > 1 else drawn


def dots(
    rows: Mapping[str, Mapping[str, Spread]],
    *,
    name: str,
    x_label: str,
    band: tuple[float, float, str] | None = None,
    numbers: bool = True,
) -> str:
    """One row for each item, the first on top, with points by series and their spreads along x; x from 0.

    band: begin, end and meaning of a shaded range. numbers: write the values above the points, if there is space.
    """
    # The bar of an outlier leaves the chart, instead of pressing all other bars together.
    most = 1.2 * max(of.median for row in rows.values() for of in row.values())
    across = Axis(x_label, 0, max(most, band[1] * 1.05 if band else 0), units.digits)
    places = {float(-at): label for at, label in enumerate(rows)}
    chart = Chart(across, Axis("", -len(rows) + 0.4, 0.6, named=places))
    if band is not None:
        chart.band(*band)
    series = list(dict.fromkeys(label for row in rows.values() for label in row))
    for number, label in enumerate(series):
        ink = _ink(label, number)
        for y, row in zip(places, rows.values(), strict=True):
            if (of := row.get(label)) is not None:
                chart.span(ink, (of.p5, y), (of.p95, y))
                text = f"{of.median:.2f}" if of.median < 10 else f"{of.median:.0f}"
                chart.dot(ink, of.median, y, text if numbers else "")
        if any(len(row) > 1 for row in rows.values()):
            chart.label(ink, label)
    return chart.render(name, height_rem=2 + 2.2 * len(rows))


def plane(points: Mapping[str, tuple[Spread, float]], *, name: str, x_label: str, y_label: str) -> str:
    """Points by name: a spread along x, and a y on a logarithmic axis."""
    low, high = min(y for _, y in points.values()) / 4, max(y for _, y in points.values()) * 4
    across = Axis(x_label, 0, max(x.p95 for x, _ in points.values()) * 1.12, units.digits)
    chart = Chart(across, Axis(y_label, low, high, units.digits, base=10))
    for number, (label, (x, y)) in enumerate(points.items()):
        ink = "0" if label.startswith("gloo") else "1"
        chart.span(ink, (x.p5, y), (x.p95, y))
        # Names of neighbours are on different sides, so that they do not cover each other.
        chart.dot(ink, x.median, y, label, side="left" if number % 2 else "right")
    return chart.render(name, height_rem=18)


def _ink(label: str, number: int) -> str:
    return next((ink for start, ink in _INKS.items() if label.startswith(start)), _OTHERS[number % len(_OTHERS)])
