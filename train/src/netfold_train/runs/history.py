"""The run's history as tables: notes and starts, then evaluations; and the recipe and the environment of the run."""

from __future__ import annotations

import json
from operator import itemgetter
from pathlib import Path
from typing import Any

from netfold import units
from netfold.page.escape import escape, terms
from netfold.page.table import Column, table
from netfold_train.runs import ENVIRONMENT, METRICS, RECIPE
from netfold_train.runs.metrics import Line, Metrics, with_unit


def history(metrics: Metrics) -> str:
    """Notes, starts and evaluations, as HTML."""
    began_s = metrics.starts[0]["time"]
    columns: tuple[Column[Line], ...] = (
        Column("after", lambda line: line["time"] - began_s, units.seconds),
        Column("step", itemgetter("step"), units.count),
        Column("level", lambda line: line.get("level", "")),
        Column("what", _text, prose=True),
    )
    found = table("notes", "Starts, choices, warnings and recoveries.", columns, metrics.happened)
    if metrics.unreadable:
        found += f'<p class="quiet">Incomplete lines of {METRICS}, not shown here: {metrics.unreadable:,}.</p>'
    found += f"<p>{metrics.cost_of_failures}</p>" if metrics.restarts else ""
    return found + (_evaluations(metrics) if metrics.evaluations else "")


def _text(line: Line) -> str:
    if line["kind"] == "note":
        return str(line["text"])
    if line["kind"] == "ended":
        return f"ended: {line['reason']}"
    after = f", going on after step {line['step']:,}" if line["step"] else ""
    return f"started{after}, on {units.plural(line['ranks'], 'rank')}"


def _evaluations(metrics: Metrics) -> str:
    metric = metrics.starts[-1]["metric"]
    units_of = dict.fromkeys(metrics.evaluations[-1]["values"], "") | {metric["name"]: metric["unit"]}
    columns: list[Column[Line]] = [Column("step", itemgetter("step"), units.count)]
    columns += [_value_column(name, unit) for name, unit in units_of.items()]
    columns.append(Column("took", itemgetter("seconds"), units.seconds))
    return table("evaluations", "Each evaluation of the held-out samples.", columns, metrics.evaluations)


def _value_column(name: str, unit: str) -> Column[Line]:
    return Column(
        name,
        lambda line: line["values"].get(name),
        lambda number: with_unit(number, unit),
        unknown="it was not a number",
    )


def provenance(folder: Path) -> str:
    """The recipe with all defaults, and the environment of the last start, as HTML. Skips missing files."""
    found = ""
    if (folder / RECIPE).exists():
        recipe = escape((folder / RECIPE).read_text(encoding="utf-8").strip())
        found += f'<pre tabindex="0"><code>{recipe}</code></pre>'
    if (folder / ENVIRONMENT).exists():
        starts = json.loads((folder / ENVIRONMENT).read_text(encoding="utf-8"))["starts"]
        found += _environment(starts[-1])
        if len(starts) > 1:
            found += f'<p class="quiet">Of the last of {len(starts)} starts; {ENVIRONMENT} has all starts.</p>'
    return found


def _environment(start: dict[str, Any]) -> str:
    hosts: dict[str, list[dict[str, Any]]] = {}
    for rank in start["ranks"]:
        hosts.setdefault(rank["host"], []).append(rank)
    machines = {
        host: f"{len(ranks)} of the ranks; {ranks[0]['cores']} cores, {ranks[0]['cpu']}; Linux {ranks[0]['kernel']}"
        for host, ranks in hosts.items()
    }
    command, commit = " ".join(start["command"]), start["commit"] or "none: not in a git work tree"
    pairs = {**start["versions"], "command": command, "commit": commit, **machines, **start["settings"]}
    return terms(pairs.items())
