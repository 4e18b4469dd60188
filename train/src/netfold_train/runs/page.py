"""A run's page, report.html: the result, the curves, the history, the communication and the recipe.

Everything comes from the run's folder, so the page can be written again elsewhere: `write_report(folder)`. The
`<script type="application/json" id="metrics">` has all valid numbers of metrics.jsonl, up to 100,000 steps.
"""

from __future__ import annotations

import base64
import json
import statistics
from pathlib import Path

from netfold import units
from netfold.page.escape import escape
from netfold.page.layout import render_layout
from netfold_train.runs import METRICS, PAGE, PICTURE_LIST, PICTURES, write_whole
from netfold_train.runs.communication import communication
from netfold_train.runs.curves import curves
from netfold_train.runs.history import history, provenance
from netfold_train.runs.metrics import Metrics, read_metrics, result

# A step takes about 130 bytes of the page. Of a longer run, the page has one step in N.
_MOST_STEPS = 100_000


def write_report(folder: Path) -> Path:
    """Write the page of a run's folder atomically, and the page of its profile beside it. Return the path.

    Raises ValueError if there is no run or the run has not begun, OSError if a file cannot be written.
    Cost: reading metrics.jsonl, about 20 microseconds a line, and the profile.
    """
    write_whole(folder / PAGE, _render(folder))
    return folder / PAGE


def _render(folder: Path) -> str:
    metrics = read_metrics(folder)
    if not metrics.starts:
        raise ValueError(f"{folder} is no folder of a run, or the run has not begun: {METRICS} has no start there")
    recipe = metrics.starts[-1]["recipe"]
    every = max(1, -(-len(metrics.steps) // _MOST_STEPS))
    some = f'<p class="quiet">This file carries the numbers of one in {every} steps; {METRICS} has all of them.</p>'
    names = dict.fromkeys(name for line in metrics.steps for name in line if name != "kind")
    numbers = {
        "starts": metrics.starts,
        "steps": {name: [line.get(name) for line in metrics.steps[::every]] for name in names},
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
            ("pictures", "What the model makes of what it has never seen", _pictures(folder)),
            ("curves", "How it went", curves(metrics)),
            ("happened", "What happened", history(metrics)),
            ("communication", "Communication", communication(folder)),
            ("recipe", "Recipe and environment", provenance(folder) + (some if every > 1 else "")),
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
    if metrics.is_finished:
        return ""
    if metrics.ended is None:
        done = (metrics.steps or metrics.starts)[-1]["step"]
        return f"<p>No end yet: the run goes on, or was cut off after step {done:,}.</p>"
    return f'<p class="failed">Ended after step {metrics.ended["step"]:,}: {escape(metrics.ended["reason"])}</p>'


def _facts(metrics: Metrics) -> list[tuple[str, str]]:
    start, steps = metrics.starts[-1], metrics.steps
    done = (steps or [start])[-1]["step"]
    found = [
        (f"{done:,}", f"of {start['steps']:,} steps, {start['batch']:,} samples each"),
        (f"{start['ranks']:,}", f"{'rank' if start['ranks'] == 1 else 'ranks'}; {start['parameters']:,} parameters"),
    ]
    if steps:
        seconds = [line["seconds"] for line in steps]
        median = statistics.median_high(seconds)
        found.append((units.seconds(median), f"a step, the median: {start['batch'] / median:.4g} samples per second"))
        took = sum(seconds) * (done / len(steps)) + sum(line["seconds"] for line in metrics.evaluations)
        found.append((units.seconds(took), "in steps and evaluations that count"))
    return found


def _pictures(folder: Path) -> str:
    """The pictures as HTML, embedded; empty if the run has none."""
    index = folder / PICTURES / PICTURE_LIST
    if not index.exists():
        return ""
    found = json.loads(index.read_text(encoding="utf-8"))
    figures = "".join(
        f'<figure><img alt="{escape(panel["title"])}" src="data:image/png;base64,'
        f'{base64.b64encode((folder / PICTURES / panel["file"]).read_bytes()).decode()}">'
        f"<figcaption>{escape(panel['title'])} <strong>{escape(panel['said'])}</strong></figcaption></figure>"
        for panel in found["panels"]
    )
    return f'<div class="pictures">{figures}</div><p class="quiet">After step {found["step"]:,}.</p>'
