"""Sections on choices: the fastest ones, memory against time, other clusters, and what more hardware would bring."""

from __future__ import annotations

from netfold import units
from netfold.page.chart import Axis, Chart
from netfold.page.escape import escape, items
from netfold.page.table import Column, of_largest, table
from netfold_plan.job import Job
from netfold_plan.render.page.bars import step_bars
from netfold_plan.render.text import outside_the_range, time
from netfold_plan.result import Result, parts, reason
from netfold_plan.search import PredictedJob, describe_split
from netfold_plan.step import Prediction
from netfold_plan.variants.hardware import Gain


def best_few(answer: Result) -> str:
    """The fastest choice of each mesh."""
    choices = answer.best_few
    if len(choices) == 1:
        return ""
    columns: tuple[Column[PredictedJob], ...] = (
        Column("mesh", lambda choice: _mesh(choice.job), meaning="ranks: tensor x pipeline x data"),
        Column("step", "prediction.step_s", time),
        Column("memory", "prediction.memory.total", units.size),
        Column("MFU", "prediction.mfu", units.ratio),
        Column("micro", "job.micro_batch", meaning="samples of a microbatch"),
        Column("virtual", "job.split.interleave", meaning="virtual stages per pipeline rank"),
        Column("ZeRO", "job.split.zero"),
        Column(
            "sequence",
            lambda choice: "yes" if choice.job.split.sequence else "no",
            meaning="whether tensor ranks split norms and dropouts by tokens",
        ),
        Column("recompute", "job.recomputation"),
        Column("what limits it", lambda choice: reason(choice, answer.best), prose=True),
    )
    order = "<p>The fastest choice of each mesh, ranks as tensor x pipeline x data.</p>"
    caption = "The same choices, and the part of a step that is longer than in the best choice."
    bars = step_bars([(_mesh(choice.job), choice) for choice in choices])
    return order + bars + table("few", caption, columns, choices)


def front(answer: Result) -> str:
    """The choices that need less memory for more time."""
    each = answer.front
    if len(each) == 1:
        return ""
    points = [(choice.prediction.memory.total / 2**30, choice.prediction.step_s) for choice in each]
    sizes = [size for size, _ in points]
    margin = 0.05 * (max(sizes) - min(sizes)) or 1.0
    across = Axis("memory of a device", min(sizes) - margin, max(sizes) + margin, lambda value: f"{value:g} GB")
    chart = Chart(across, Axis("time of a step", 0, 1.05 * max(seconds for _, seconds in points), units.seconds))
    chart.line("0", points, dots=True)
    columns: tuple[Column[PredictedJob], ...] = (
        Column("memory", "prediction.memory.total", units.size),
        Column("step", "prediction.step_s", time),
        Column("split", lambda choice: describe_split(choice.job), prose=True),
    )
    first, last = each[0].prediction, each[-1].prediction
    drawn = chart.render(
        f"{len(each)} choices, from {time(first.step_s)} with {units.size(first.memory.total)} to {time(last.step_s)} "
        f"with {units.size(last.memory.total)}"
    )
    caption = "No choice that fits is better than one of these in both time and memory."
    return f'<div class="charts">{drawn}</div>{table("front", caption, columns, each)}'


def simulated_table(closed: Prediction, events: Prediction) -> str:
    """The step by events beside its closed form, part by part."""
    here, there = parts(closed), parts(events)
    rows = [(name, here.get(name, 0.0), there.get(name, 0.0)) for name in {**here, **there}]
    columns: tuple[Column[tuple[str, float, float]], ...] = (
        Column("part", lambda row: row[0]),
        Column("closed form", lambda row: row[1], time),
        Column("as events", lambda row: row[2], time),
    )
    rows.append(("together", closed.step_s, events.step_s))
    caption = "The same step, simulated as events."
    if not closed.low_s <= events.step_s <= closed.high_s:
        caption += f" As events it takes {outside_the_range(closed, events)}."
    return table("played", caption, columns, rows)


def comparisons(answer: Result) -> str:
    """The job on other networks and clusters."""
    found = ""
    for text, variants in answer.comparisons.items():
        fitting = [(each.name, each.choice) for each in variants if each.choice is not None]
        factors = ", ".join(
            f"{each.name} {units.times(each.factor)}" for each in variants[1:] if each.choice is not None
        )
        factors = f": {factors} as fast, each with its own best split" if factors else ""
        notes = items(f"{each.name}: {each.why or each.assumed}" for each in variants if each.why or each.assumed)
        found += f"<p>{escape(text + factors)}.</p>{step_bars(fitting)}{notes}"
    return found


def gains(answer: Result) -> str:
    """The gain from more of one resource."""
    if not answer.gains:
        return ""
    columns: tuple[Column[Gain], ...] = (
        Column("with", "what"),
        Column(
            "as fast",
            "factor",
            units.times,
            bar=of_largest(answer.gains, lambda gain: max(0.0, gain.factor - 1)),
        ),
        Column("step", "step_s", time),
        Column("split as now", lambda gain: gain.base_s / gain.kept_s, units.times),
        Column("best split then", lambda gain: describe_split(gain.choice.job), prose=True),
    )
    return table("gains", "Each change alone. Bars show what the change gains.", columns, answer.gains)


def _mesh(job: Job) -> str:
    return f"{job.split.tensor} x {job.split.pipeline} x {job.split.data}"
