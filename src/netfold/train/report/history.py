"""What happened in a run, in its order: notes and starts; then each look at the held-out samples."""

from __future__ import annotations

import functools

from netfold.profile.page import units
from netfold.profile.page.table import Column, table
from netfold.train.callbacks.metrics_file import NAME, Line, Metrics
from netfold.train.callbacks.result import with_unit


def history(metrics: Metrics) -> str:
    return _notes(metrics) + _evaluations(metrics)


def _notes(metrics: Metrics) -> str:
    began_s = metrics.starts[0]["time"]
    columns: tuple[Column[Line], ...] = (
        Column("after", lambda line: line["time"] - began_s, units.seconds),
        Column("step", lambda line: line["step"], units.count),
        Column("level", lambda line: line.get("level", "")),
        Column("what", _words),
    )
    lost = ""
    if metrics.unreadable:
        lost = f'<p class="quiet">Lines of {NAME} that were cut off, and are missing here: {metrics.unreadable:,}.</p>'
    return table("notes", "Starts, choices, warnings and recoveries.", columns, metrics.happened) + lost


def _words(line: Line) -> str:
    if line["kind"] == "note":
        return str(line["text"])
    if line["kind"] == "ended":
        return f"ended: {line['reason']}"
    after = f", going on after step {line['step']:,}" if line["step"] else ""
    return f"started{after}, on {line['ranks']} {'rank' if line['ranks'] == 1 else 'ranks'}"


def _evaluations(metrics: Metrics) -> str:
    if not metrics.evaluations:
        return ""
    metric = metrics.starts[-1]["metric"]
    others = [name for name in metrics.evaluations[-1]["values"] if name != metric["name"]]
    columns: tuple[Column[Line], ...] = (
        Column("step", lambda line: line["step"], units.count),
        Column(
            metric["name"],
            functools.partial(_value, metric["name"]),
            lambda value: with_unit(value, metric["unit"]),
            unknown="it was not a number",
        ),
        *(
            Column(name, functools.partial(_value, name), "{:.4g}".format, unknown="it was not a number")
            for name in others
        ),
        Column("took", lambda line: line["seconds"], units.seconds),
    )
    return table("evaluations", "Each look at the held-out samples.", columns, metrics.evaluations)


def _value(name: str, line: Line) -> float | None:
    found: float | None = line["values"].get(name)
    return found
