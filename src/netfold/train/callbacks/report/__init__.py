"""A run's page, report.html: the result, the curves, the history, the communication and the recipe.

Everything comes from the run's folder, so the page can be written again elsewhere: `write_report(folder)`. The
`<script type="application/json" id="metrics">` has all valid numbers of metrics.jsonl, up to 100,000 steps.
"""

from __future__ import annotations

import base64
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from netfold import units
from netfold.page.escape import escape
from netfold.page.layout import render_layout
from netfold.train.callbacks.events import Callback, Ended, Evaluated, Started
from netfold.train.callbacks.metrics_file import NAME, Metrics, read_metrics, result
from netfold.train.callbacks.report.communication import communication
from netfold.train.callbacks.report.curves import curves
from netfold.train.callbacks.report.history import history, provenance
from netfold.train.callbacks.run_folder import write_whole
from netfold.train.data.examples import Panel

__all__ = ["PAGE", "ReportCallback", "write_report"]

PAGE = "report.html"
_PICTURES, _INDEX = "pictures", "pictures.json"
# A step takes about 130 bytes of the page. Of a longer run, the page has one step in N.
_MOST_STEPS = 100_000
# All ranks wait while rank 0 writes. Writing takes at most this fraction (1/200) of the time before the end.
_RARE = 200


class ReportCallback(Callback):
    """Write a run's page at evaluations and at the end of the run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._next_s = 0.0
        self._steps = 0

    def on_start(self, event: Started) -> None:
        self._steps = event.steps

    def on_evaluation(self, event: Evaluated) -> None:
        if event.pictures:
            _write_pictures(self._folder, event.step, event.pictures)
        began_s = time.monotonic()
        if began_s < self._next_s or event.step == self._steps:  # the end comes next
            return
        write_report(self._folder)
        ended_s = time.monotonic()
        self._next_s = ended_s + _RARE * (ended_s - began_s)

    def on_end(self, event: Ended) -> None:
        write_report(self._folder)


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
        raise ValueError(f"{folder} is no folder of a run, or the run has not begun: {NAME} has no start there")
    recipe = metrics.starts[-1]["recipe"]
    every = max(1, -(-len(metrics.steps) // _MOST_STEPS))
    some = f'<p class="quiet">This file carries the numbers of one in {every} steps; {NAME} has all of them.</p>'
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


def _write_pictures(folder: Path, step: int, panels: Sequence[Panel]) -> None:
    """Replace the PNG files in the folder, and then their list."""
    (folder / _PICTURES).mkdir(exist_ok=True)
    listed = []
    for panel in panels:
        file = f"{panel.title}.png".replace(" ", "-")
        Image.fromarray(panel.pixels.permute(1, 2, 0).contiguous().numpy()).save(folder / _PICTURES / file)
        listed.append({"title": panel.title, "said": panel.said, "file": file})
    (folder / _PICTURES / _INDEX).write_text(json.dumps({"step": step, "panels": listed}, indent=1), encoding="utf-8")


def _pictures(folder: Path) -> str:
    """The pictures as HTML, embedded; empty if the run has none."""
    index = folder / _PICTURES / _INDEX
    if not index.exists():
        return ""
    found = json.loads(index.read_text(encoding="utf-8"))
    figures = "".join(
        f'<figure><img alt="{escape(panel["title"])}" src="data:image/png;base64,'
        f'{base64.b64encode((folder / _PICTURES / panel["file"]).read_bytes()).decode()}">'
        f"<figcaption>{escape(panel['title'])} <strong>{escape(panel['said'])}</strong></figcaption></figure>"
        for panel in found["panels"]
    )
    return f'<div class="pictures">{figures}</div><p class="quiet">After step {found["step"]:,}.</p>'
