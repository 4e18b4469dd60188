"""Steps of training over time: how long each took, how much of it was communication, and what of that was exposed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from netfold.profile.findings import Overlap, StepTimes
from netfold.profile.page import units
from netfold.profile.page.chart import SIDE, Axis, chart
from netfold.profile.page.escape import escape
from netfold.profile.page.table import Column, table

# More steps than this share a place: of those that do, the slowest is drawn.
_MOST_PLACES = 400
_UNKNOWN = "nobody watched the training thread, or operations were seen as submitted only"


def steps(times: StepTimes, each: Sequence[Overlap]) -> str:
    """each: the steps in their order, empty where only their spread is known."""
    return _table(times) + (_figure(each) if each else "")


def _table(times: StepTimes) -> str:
    columns: tuple[Column[tuple[str, tuple[float, float, float] | None]], ...] = (
        Column("of one step", lambda line: line[0]),
        Column("median", lambda line: None if line[1] is None else line[1][0], units.seconds, unknown=_UNKNOWN),
        Column("p5", lambda line: None if line[1] is None else line[1][1], units.seconds, unknown=_UNKNOWN),
        Column("p95", lambda line: None if line[1] is None else line[1][2], units.seconds, unknown=_UNKNOWN),
    )
    lines = (("wall time", times.wall_s), ("communication", times.communication_s), ("exposed", times.exposed_s))
    return table("steps", f"{units.count(times.count)} steps of training; a rank's times.", columns, lines)


def _figure(each: Sequence[Overlap]) -> str:
    together = -(-len(each) // _MOST_PLACES)
    numbers = [
        max(range(first, min(first + together, len(each))), key=lambda index: each[index].wall_s)
        for first in range(0, len(each), together)
    ]
    across = Axis("step", 0, max(1, len(each)), units.count, least_step=1)
    up = Axis("time", 0, max(each[index].wall_s for index in numbers) or 1.0, units.seconds)

    def area(name: str, value: Callable[[Overlap], float]) -> str:
        points = []
        for place, index in enumerate(numbers):
            ends = (place * together, min((place + 1) * together, len(each)))
            points += [f"{across.at(end):.1f},{SIDE - up.at(value(each[index])):.1f}" for end in ends]
        return f'<polygon class="{name}" points="0,{SIDE} {" ".join(points)} {across.at(len(each)):.1f},{SIDE}"/>'

    marks, keys = area("wall", lambda step: step.wall_s), [("wall", "wall time")]
    if all(each[index].communication_s is not None for index in numbers):
        marks += area("communication", lambda step: step.communication_s or 0.0)
        keys.append(("communication", "communication"))
    if all(each[index].exposed_s is not None for index in numbers):
        marks += area("exposed", lambda step: step.exposed_s or 0.0)
        keys.append(("exposed", "exposed communication"))
    shared = f" Of every {together} steps in a row the slowest is drawn." if together > 1 else ""
    legend = "".join(f'<span><i class="{name}"></i>{escape(text)}</span>' for name, text in keys)
    said = f"{len(each)} steps over time: {', '.join(text for _, text in keys)}; the table above has their spread"
    return (
        f'<figure id="step-times"><div class="legend">{legend}</div>{chart(marks, across, up, said=said)}'
        f"<figcaption>Each step's wall time, and the parts of it that were communication and exposed communication. "
        f"They lie over each other, all from zero.{shared}</figcaption></figure>"
    )
