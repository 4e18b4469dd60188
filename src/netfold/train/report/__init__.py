"""A run's page, report.html: the result, the curves, the history and the recipe.

    curves         a chart for each quantity            history     notes, starts and evaluations; recipe, environment
    pictures       what the model makes                 listener    writes the page during a run
    communication  the main figures of the profile

Everything comes from the run's folder, so the page can be written again elsewhere: `write_report(folder)`. The
`<script type="application/json" id="metrics">` has all valid numbers of metrics.jsonl, up to 100,000 steps.
"""

from __future__ import annotations

import os
from pathlib import Path

from netfold import units
from netfold.page.escape import escape
from netfold.page.layout import render_layout
from netfold.train.callbacks.metrics_file import NAME, Metrics, read_metrics
from netfold.train.callbacks.result import result
from netfold.train.report.communication import communication
from netfold.train.report.curves import columns, curves
from netfold.train.report.history import history, provenance
from netfold.train.report.pictures import pictures

__all__ = ["PAGE", "write_report"]

PAGE = "report.html"
# A step takes about 130 bytes of the page. Of a longer run, the page has one step in N.
_MOST_STEPS = 100_000


def write_report(folder: Path) -> Path:
    """Write the page of a run's folder atomically, and the page of its profile beside it. Return the path.

    Raises ValueError if there is no run or the run has not begun, OSError if a file cannot be written.
    Cost: reading metrics.jsonl, about 20 microseconds a line, and the profile.
    """
    page = folder / PAGE
    new = page.with_name(PAGE + ".new")
    new.write_text(_render(folder), encoding="utf-8")
    os.replace(new, page)
    return page


def _render(folder: Path) -> str:
    metrics = read_metrics(folder)
    if not metrics.starts:
        raise ValueError(f"{folder} is no folder of a run, or the run has not begun: {NAME} has no start there")
    recipe = metrics.starts[-1]["recipe"]
    every = max(1, -(-len(metrics.steps) // _MOST_STEPS))
    numbers = {
        "starts": metrics.starts,
        "steps": columns(metrics.steps[::every]),
        "evaluations": metrics.evaluations,
        "notes": metrics.notes,
        "ended": metrics.ended,
    }
    what = f"{folder.name}: {recipe['model']['name']} on {recipe['data']['name']}"
    return render_layout(
        title=f"netfold train: {folder.name}",
        headline=_headline(metrics),
        opening=f'<p class="command">{escape(what)}</p>\n{_end(metrics)}',
        facts=_facts(metrics),
        sections=[
            ("pictures", "What the model makes of what it has never seen", pictures(folder)),
            ("curves", "How it went", curves(metrics)),
            ("happened", "What happened", history(metrics)),
            ("communication", "Communication", communication(folder)),
            ("recipe", "Recipe and environment", provenance(folder) + _carried(every)),
        ],
        data=("metrics", numbers),
    )


def _headline(metrics: Metrics) -> str:
    metric = metrics.starts[-1]["metric"]
    if not metrics.evaluations:
        return "There is no evaluation of held-out samples yet."
    last = metrics.evaluations[-1]
    when = "" if metrics.is_finished else f" (after step {last['step']:,})"
    return f"{result(metric, last['values'].get(metric['name']))}{when}."


def _end(metrics: Metrics) -> str:
    ended, done = metrics.ended, metrics.steps[-1]["step"] if metrics.steps else metrics.starts[-1]["step"]
    if metrics.is_finished:
        return ""
    if ended is None:
        return f"<p>No end yet: the run goes on, or was cut off after step {done:,}.</p>"
    return f'<p class="failed">Ended after step {ended["step"]:,}: {escape(ended["reason"])}</p>'


def _carried(every: int) -> str:
    if every == 1:
        return ""
    return f'<p class="quiet">This file carries the numbers of one in {every} steps; {NAME} has all of them.</p>'


def _facts(metrics: Metrics) -> list[tuple[str, str]]:
    start, steps = metrics.starts[-1], metrics.steps
    done = steps[-1]["step"] if steps else start["step"]
    found = [
        (f"{done:,}", f"of {start['steps']:,} steps, {start['batch']:,} samples each"),
        (f"{start['ranks']:,}", f"{'rank' if start['ranks'] == 1 else 'ranks'}; {start['parameters']:,} parameters"),
    ]
    if steps:
        seconds = sorted(line["seconds"] for line in steps)
        median = seconds[len(seconds) // 2]
        rate = f"{start['batch'] / median:.4g} samples a second"
        found.append((units.seconds(median), f"a step, the median: {rate}"))
        took = sum(seconds) * (steps[-1]["step"] / len(steps)) + sum(line["seconds"] for line in metrics.evaluations)
        found.append((units.seconds(took), "in steps and evaluations that count"))
    return found
