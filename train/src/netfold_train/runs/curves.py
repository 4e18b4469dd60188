"""One chart for each quantity, by step. Warnings, errors and restarts are vertical lines in all charts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from netfold import units
from netfold.page.chart import Axis, Chart, legend
from netfold_train.runs.metrics import Metrics, with_unit

# Of more points than this, neighbours share a place, and the lowest and the highest of them are drawn.
_MOST_PLACES = 400
# A curve above zero whose highest value is this many times its lowest is drawn on a logarithmic axis.
_WIDE = 20.0
# By level of a note: the colour of its line, and its entry in the legend.
_LEVELS = {
    "warning": ("5", "a warning"),
    "error": ("bad", "an error"),
    "again": ("computing", "continued from a checkpoint, or began anew"),
}

Points = list[tuple[int, float | None]]


def curves(metrics: Metrics) -> str:
    """The charts of all quantities that the run recorded, as HTML."""
    start, steps = metrics.starts[-1], metrics.steps
    metric, unit = start["metric"], start["metric"]["unit"]
    last = max(start["steps"], steps[-1]["step"] if steps else 1)
    notes = [(line["step"], line["level"], line["text"]) for line in metrics.notes if line["level"] in _LEVELS]
    notes += [(line["step"], "again", "continued from here") for line in metrics.starts[1:]]

    def held_out(name: str) -> Points:
        return [(line["step"], line["values"].get(name)) for line in metrics.evaluations]

    def chart(
        title: str,
        name: str,
        text: Callable[[float], str] = units.digits,
        *,
        label: str = "",
        others: Points | None = None,
        level: tuple[float, str] | None = None,
        zero: bool = False,
    ) -> str:
        """name: of the steps' values, drawn with `label`. others: held-out values. level: a value at every step."""
        series = [("0", label, [(line["step"], line.get(name)) for line in steps]), ("1", "held-out", others or [])]
        values = [value for _, _, points in series for _, value in points if value is not None]
        if not values:
            return ""
        up = _axis(title, [*values, *([level[0]] if level else [])], text, zero)
        drawn = Chart(Axis("step", 0, last, units.count, least_step=1), up)
        for step, kind, note in notes:
            drawn.moment(_LEVELS[kind][0], step, f"step {step:,}: {note}")
        for ink, words, points in series:
            known = sum(value is not None for _, value in points)
            if known:
                # A point alone, such as the one evaluation of a short run, is no line.
                drawn.line(ink, _thinned(points), words, dots=known == 1)
        if level is not None:
            drawn.level(*level)
        return drawn.render(f"{title} by step, from {text(values[0])} to {text(values[-1])}")

    baseline = (metric["baseline"], f"{metric['baseline_is']}, {with_unit(metric['baseline'], unit)}")
    title = f"{metric['name']}, {unit}" if unit else metric["name"]
    drawn = [
        chart("loss", "loss", label="training", others=held_out("loss")),
        chart(title, "", others=held_out(metric["name"]), level=baseline),
        chart("learning rate", "lr", zero=True),
        chart("time of a step", "seconds", units.seconds, zero=True),
        chart("samples per second", "samples_per_s", zero=True),
        chart("gradients' norm", "gradient_norm"),
        chart("exposed communication, about", "exposed", units.ratio, zero=True),
    ]
    shown = {level for _, level, _ in notes}
    key = {text: f"ink-{ink} note" for level, (ink, text) in _LEVELS.items() if level in shown}
    return f'{legend(key)}<div class="charts">{"".join(drawn)}</div>'


def _axis(title: str, values: Sequence[float], text: Callable[[float], str], zero: bool) -> Axis:
    low, high = min(values), max(values)
    if not zero and low > 0 and high / low > _WIDE:
        return Axis.holding(title, low, high, text, 10)
    if zero:
        low = min(0.0, low)
    # The margin of a constant curve is not 0.
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return Axis(title, low if zero and low == 0 else low - margin, high + margin, text)


def _thinned(points: Points) -> Points:
    together = max(1, -(-len(points) // _MOST_PLACES))
    kept: Points = []
    for first in range(0, len(points), together):
        known = [(value, step) for step, value in points[first : first + together] if value is not None]
        kept += sorted({(step, value) for value, step in (min(known), max(known))}) if known else [points[first]]
    return kept
