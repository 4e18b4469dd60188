"""A chart a quantity, by step; what was noted stands as a line in each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from netfold.profile.page import units
from netfold.profile.page.chart import SIDE, Axis, chart
from netfold.profile.page.escape import escape
from netfold.train.callbacks.metrics_file import Line, Metrics
from netfold.train.callbacks.result import with_unit

# More points than this share a place, of which the lowest and the highest are drawn.
_MOST_PLACES = 400
# From here on a curve that never touches zero is read better by its powers of ten.
_WIDE = 20.0

Points = list[tuple[int, float | None]]


def columns(lines: Sequence[Line]) -> dict[str, list[Any]]:
    """Lines of one kind as a list a key, in their order; None where a line lacks one."""
    names = dict.fromkeys(name for line in lines for name in line if name != "kind")
    return {name: [line.get(name) for line in lines] for name in names}


def curves(metrics: Metrics) -> str:
    start, steps = metrics.starts[-1], metrics.steps
    metric = start["metric"]
    last = max(start["steps"], steps[-1]["step"] if steps else 1)
    across = Axis("step", 0, last, units.count, least_step=1)
    marks = _notes(metrics, across)
    held_out = [(line["step"], line["values"].get("loss")) for line in metrics.evaluations]
    values = [(line["step"], line["values"].get(metric["name"])) for line in metrics.evaluations]

    def of(name: str) -> Points:
        return [(line["step"], line.get(name)) for line in steps]

    unit = metric["unit"]
    title = f"{metric['name']}, {unit}" if unit else metric["name"]
    drawn = [
        _figure("loss", _digits, across, marks, [("line", "training", of("loss")), ("other", "held-out", held_out)]),
        _figure(
            title, _digits, across, marks, [("other", "held-out", values)],
            level=(metric["baseline"], f"{metric['baseline_is']}, {with_unit(metric['baseline'], unit)}"),
        ),
        _figure("learning rate", _digits, across, marks, [("line", "", of("lr"))], zero=True),
        _figure("time of a step", units.seconds, across, marks, [("line", "", of("seconds"))], zero=True),
        _figure("samples a second", _digits, across, marks, [("line", "", of("samples_per_s"))], zero=True),
        _figure("gradients' norm", _digits, across, marks, [("line", "", of("gradient_norm"))]),
        _figure("exposed communication, about", units.ratio, across, marks, [("line", "", of("exposed"))], zero=True),
    ]  # fmt: skip
    key = "".join(f'<span><i class="{level}"></i>{name}</span>' for level, name in _levels(metrics))
    above = f'<div class="legend">{key}</div>' if key else ""
    return f'{above}<div class="curves">{"".join(drawn)}</div>'


def _figure(
    title: str,
    text: Callable[[float], str],
    across: Axis,
    notes: str,
    each: Sequence[tuple[str, str, Points]],
    *,
    level: tuple[float, str] | None = None,
    zero: bool = False,
) -> str:
    """each: a class of the style, a name, a curve. level: a value that is there at every step. No points: nothing."""
    found = [value for _, _, points in each for _, value in points if value is not None]
    if not found:
        return ""
    up = _axis(title, [*found, *([level[0]] if level else [])], text, zero)
    marks, keys = notes, []
    for name, words, points in each:
        if any(value is not None for _, value in points):
            marks += f'<path class="{name}" d="{_path(points, across, up)}"/>'
            keys += [(name, words)] if words else []
    if level is not None:
        at = SIDE - up.at(level[0])
        marks += f'<line class="level" x1="0" x2="{SIDE}" y1="{at:.1f}" y2="{at:.1f}"/>'
        keys.append(("level", level[1]))
    legend = "".join(f'<span><i class="{name}"></i>{escape(words)}</span>' for name, words in keys)
    said = f"{title} by step, from {text(found[0])} to {text(found[-1])}"
    return f'<figure>{chart(marks, across, up, said=said)}<div class="legend">{legend}</div></figure>'


def _axis(title: str, values: Sequence[float], text: Callable[[float], str], zero: bool) -> Axis:
    low, high = min(values), max(values)
    if not zero and low > 0 and high / low > _WIDE:
        return Axis.holding(title, low, high, text, 10)
    if zero:
        low = min(0.0, low)
    # Room for a curve that does not move.
    room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return Axis(title, low if zero and low == 0 else low - room, high + room, text)


def _path(points: Points, across: Axis, up: Axis) -> str:
    """A line from point to point, broken where there is no number; a point with no neighbours is a dot."""
    drawn, is_on = [], False
    for step, value in _thinned(points):
        if value is None:
            is_on = False
            continue
        # `h0` makes a dot of a line's end.
        drawn.append(f"{'L' if is_on else 'M'}{across.at(step):.1f},{SIDE - up.at(value):.1f}{'' if is_on else 'h0'}")
        is_on = True
    return "".join(drawn)


def _thinned(points: Points) -> Points:
    together = -(-len(points) // _MOST_PLACES)
    if together == 1:
        return points
    kept: Points = []
    for first in range(0, len(points), together):
        place = [(step, value) for step, value in points[first : first + together] if value is not None]
        if not place:
            kept.append((points[first][0], None))
            continue
        ends = {min(place, key=lambda each: each[1]), max(place, key=lambda each: each[1])}
        kept += sorted(ends)
    return kept


def _notes(metrics: Metrics, across: Axis) -> str:
    drawn = [(line["step"], line["level"], line["text"]) for line in metrics.notes if line["level"] != "info"]
    drawn += [(line["step"], "again", "went on from here") for line in metrics.starts[1:]]
    return "".join(
        f'<line class="note {escape(level)}" x1="{across.at(step):.1f}" x2="{across.at(step):.1f}" y1="0" y2="{SIDE}">'
        f"<title>step {step:,}: {escape(text)}</title></line>"
        for step, level, text in drawn
    )


def _levels(metrics: Metrics) -> list[tuple[str, str]]:
    there = {line["level"] for line in metrics.notes}
    names = [("warning", "a warning"), ("error", "an error")]
    return [(f"note {level}", name) for level, name in names if level in there] + (
        [("note again", "went on from a checkpoint, or began anew")] if len(metrics.starts) > 1 else []
    )


def _digits(value: float) -> str:
    """As few as tell two ticks apart: `0.0312`, `28.4`, `1e-5`, `12,000`."""
    if value != 0 and not 1e-4 <= abs(value) < 1e6:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
