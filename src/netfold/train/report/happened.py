"""What happened in a run, in its order: notes and starts; then each look at the held-out samples."""

from __future__ import annotations

import functools

from netfold.profile.page import units
from netfold.profile.page.table import Column, table
from netfold.train.metrics_file import Line, Metrics
from netfold.train.result import with_unit


def happened(metrics: Metrics) -> str:
    return _notes(metrics) + _evaluations(metrics)


def _notes(metrics: Metrics) -> str:
    began_s = metrics.starts[0]["time"]
    said = list(metrics.notes)
    for number, start in enumerate(metrics.starts):
        step, ranks = start["step"], start["ranks"]
        how = "started" if number == 0 else f"started again, going on after step {step:,}" if step else "started again"
        said.append({**start, "level": "", "text": f"{how}, on {ranks} {'rank' if ranks == 1 else 'ranks'}"})
    if metrics.ended is not None:
        said.append({**metrics.ended, "level": "", "text": f"ended: {metrics.ended['reason']}"})
    said.sort(key=lambda line: float(line["time"]))
    columns: tuple[Column[Line], ...] = (
        Column("after", lambda line: line["time"] - began_s, units.seconds),
        Column("step", lambda line: line["step"], units.count),
        Column("", lambda line: line["level"]),
        Column("what", lambda line: line["text"]),
    )
    return table("notes", "Starts, choices, warnings and recoveries.", columns, said)


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
