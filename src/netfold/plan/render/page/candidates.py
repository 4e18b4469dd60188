"""Ways to split: the best few as bars and a table, and what less memory costs in time."""

from __future__ import annotations

from netfold.plan.job import Job
from netfold.plan.render.page.split import bar, classes, legend
from netfold.plan.render.text import time
from netfold.plan.result import RankedChoice, Result, parts
from netfold.plan.search import Choice, describe_split
from netfold.profile.page import units
from netfold.profile.page.chart import SIDE, Axis, chart
from netfold.profile.page.escape import escape
from netfold.profile.page.table import Column, table


def best_few(answer: Result) -> str:
    if len(answer.best_few) == 1:
        return ""
    return stacks([(mesh(way.choice.job), way.choice) for way in answer.best_few]) + _table(answer)


def stacks(each: list[tuple[str, Choice]]) -> str:
    """A bar of parts a choice, as long as its step takes."""
    longest = max(choice.prediction.step_s for _, choice in each)
    rows = "".join(
        f'<div class="row"><span class="name">{escape(name)}</span>'
        f"{bar(classes(choice.prediction), longest, name, thin=True)}"
        f'<span class="end">{time(choice.prediction.step_s)}</span></div>'
        for name, choice in each
    )
    names = {name: name for _, choice in each for name in parts(choice.prediction)}
    return f'<div class="stacks">{rows}</div>{legend(names)}'


def mesh(job: Job) -> str:
    split = job.split
    return f"{split.tensor} x {split.pipeline} x {split.data}"


def front(answer: Result) -> str:
    each = answer.front
    if len(each) == 1:
        return ""
    times = [choice.prediction.step_s for choice in each]
    sizes = [choice.prediction.memory.total for choice in each]
    room = 0.05 * (max(sizes) - min(sizes)) or 1.0
    across = Axis("memory of a device", (min(sizes) - room) / 2**30, (max(sizes) + room) / 2**30, _gigabytes)
    up = Axis("time of a step", 0, 1.05 * max(times), _seconds)
    # A way is taken until one with less memory begins.
    points = [
        f"{across.at(size / 2**30):.1f},{SIDE - up.at(seconds):.1f}" for size, seconds in zip(sizes, times, strict=True)
    ]
    marks = f'<path class="front" d="M{" L".join(points)}"/>'
    marks += "".join(f'<path class="front dot" d="M{point}h0"/>' for point in points)
    said = f"{len(each)} ways, from {time(times[0])} with {units.size(sizes[0])} to {time(times[-1])} with less memory"
    columns: tuple[Column[Choice], ...] = (
        Column("memory", lambda choice: choice.prediction.memory.total, units.size),
        Column("step", lambda choice: choice.prediction.step_s, time),
        Column("split", lambda choice: describe_split(choice.job)),
    )
    rows = table("front", "No way that fits is better than one of these in both time and memory.", columns, each)
    return f'<div class="charts"><figure class="alone">{chart(marks, across, up, said=said)}</figure></div>{rows}'


def _gigabytes(value: float) -> str:
    return f"{value:g} GB"


def _seconds(value: float) -> str:
    return f"{value:g} s"


def _table(answer: Result) -> str:
    ways = answer.best_few
    columns: tuple[Column[RankedChoice], ...] = (
        Column("mesh", lambda way: mesh(way.choice.job), meaning="ranks: tensor x pipeline x data"),
        Column("step", lambda way: way.choice.prediction.step_s, time),
        Column("memory", lambda way: way.choice.prediction.memory.total, units.size),
        Column("MFU", lambda way: way.choice.prediction.mfu, units.ratio),
        Column("micro", lambda way: way.choice.job.micro_batch, meaning="samples of a microbatch"),
        Column("pieces", lambda way: way.choice.job.split.interleave, meaning="of the model, that a stage holds"),
        Column("ZeRO", lambda way: way.choice.job.split.zero),
        Column(
            "sequence",
            lambda way: "yes" if way.choice.job.split.sequence else "no",
            meaning="whether tensor ranks split norms and dropouts by tokens",
        ),
        Column("recompute", lambda way: way.choice.job.recomputation),
        Column("what limits it", lambda way: way.reason),
    )
    return table("few", "The fastest way of each mesh; what it pays more for than the best.", columns, ways)
