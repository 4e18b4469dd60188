"""Training steps over time: wall time, communication and exposed communication of each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from netfold import units
from netfold.page.chart import Axis, Chart
from netfold.page.table import Column, table
from netfold.profile.findings import Overlap, StepTimes

# Of more steps than this, neighbours share a place, and the slowest of them is drawn.
_MOST_PLACES = 400
_UNKNOWN = "the training thread was not watched, or only the submissions of operations were recorded"
_Line = tuple[str, tuple[float, float, float] | None]


def steps(times: StepTimes, each: Sequence[Overlap]) -> str:
    """A table, and a chart. each: the steps in order; empty if only `times` is known."""
    columns: list[Column[_Line]] = [Column("of one step", lambda line: line[0])]
    for at, title in enumerate(("median", "p5", "p95")):
        columns.append(Column(title, _value(at), units.seconds, unknown=_UNKNOWN))
    lines = (("wall time", times.wall_s), ("communication", times.communication_s), ("exposed", times.exposed_s))
    caption = f"{units.count(times.count)} steps of training; the times of one rank."
    return table("steps", caption, columns, lines) + (_chart(each) if each else "")


def _value(at: int) -> Callable[[_Line], float | None]:
    return lambda line: None if line[1] is None else line[1][at]


def _chart(each: Sequence[Overlap]) -> str:
    together = -(-len(each) // _MOST_PLACES)
    numbers = [
        max(range(first, min(first + together, len(each))), key=lambda index: each[index].wall_s)
        for first in range(0, len(each), together)
    ]
    across = Axis("step", 0, max(1, len(each)), units.count, least_step=1)
    up = Axis("time", 0, max(each[index].wall_s for index in numbers) or 1.0, units.seconds)
    chart, shown = Chart(across, up), []
    lines: list[tuple[str, str, Callable[[Overlap], float | None]]] = [
        ("wall", "wall time", lambda step: step.wall_s),
        ("bar", "communication", lambda step: step.communication_s),
        ("accent", "exposed communication", lambda step: step.exposed_s),
    ]
    for ink, label, value in lines:
        values = [one for one in (value(each[index]) for index in numbers) if one is not None]
        if len(values) == len(numbers):
            points = []
            for place, one in enumerate(values):
                ends = (place * together, min((place + 1) * together, len(each)))
                points += [(float(end), one) for end in ends]
            chart.area(ink, points, label)
            shown.append(label)
    shared = f" Of every {together} steps in a row the slowest is drawn." if together > 1 else ""
    return chart.render(
        f"{len(each)} steps over time: {', '.join(shown)}; the table above has their spread",
        "Each step's wall time, communication and exposed communication. The areas overlap, and all of them begin at "
        f"zero.{shared}",
    )
