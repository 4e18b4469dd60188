"""The same job elsewhere, and what more of one thing would buy."""

from __future__ import annotations

from netfold.plan.render.page.candidates import stacks
from netfold.plan.render.text import describe_aggregators, time, times
from netfold.plan.result import Result
from netfold.plan.search import describe_split
from netfold.plan.sensitivity import Gain
from netfold.profile.page.escape import escape
from netfold.profile.page.table import Column, of_largest, table


def comparisons(answer: Result) -> str:
    said = []
    for text, variants in answer.comparisons.items():
        there = [(each.name, each.choice) for each in variants if each.choice is not None]
        notes = "".join(f"<li>{escape(each.name)}: {escape(each.why)}</li>" for each in variants if each.why)
        factors = ", ".join(f"{each.name} {times(each.factor)}" for each in variants[1:] if each.choice is not None)
        said.append(
            f"<p>{escape(text)}{f': {escape(factors)} as fast, each split as is best there' if factors else ''}.</p>"
            f"{stacks(there)}{f'<ul>{notes}</ul>' if notes else ''}"
        )
    return "".join(said)


def aggregators(answer: Result) -> str:
    said = "".join(f"<li>{escape(each)}</li>" for each in describe_aggregators(answer))
    return f"<ul>{said}</ul>" if said else ""


def gains(answer: Result) -> str:
    if not answer.gains:
        return ""
    columns: tuple[Column[Gain], ...] = (
        Column("with", lambda gain: gain.what),
        Column(
            "as fast", lambda gain: gain.factor, times,
            bar=of_largest(answer.gains, lambda gain: max(0.0, gain.factor - 1)),
        ),
        Column("step", lambda gain: gain.step_s, time),
        Column("split as now", lambda gain: gain.base_s / gain.kept_s, times),
        Column("best split then", lambda gain: describe_split(gain.choice.job)),
    )  # fmt: skip
    return table("gains", "Each change alone, all else as it is; bars show what is gained.", columns, answer.gains)
