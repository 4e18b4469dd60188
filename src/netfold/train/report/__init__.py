"""A run's page, report.html: what came of it, how it went, what it was. One file, no network, light and dark.

    curves         a chart a quantity          happened     notes, starts and evaluations, as tables
    pictures       what the model makes        made_with    the recipe, the environment
    communication  the profile's main figures  listener     writes the page while a run goes on

Made of the run's folder alone, so it can be made again elsewhere: `write_report(folder)`.
`<script type="application/json" id="metrics">` carries every number of metrics.jsonl that counts, up to 100,000 steps.
"""

from __future__ import annotations

import os
from pathlib import Path

from netfold.profile import page as profile_page
from netfold.profile.page import hash_of, units
from netfold.profile.page.plain import embed, escape
from netfold.train.audience.metrics_file import NAME, Metrics, read_metrics
from netfold.train.audience.result import result
from netfold.train.report.communication import communication
from netfold.train.report.curves import columns, curves
from netfold.train.report.happened import happened
from netfold.train.report.made_with import made_with
from netfold.train.report.pictures import pictures

__all__ = ["PAGE", "write_report"]

PAGE = "report.html"
_SHARED = Path(profile_page.__file__).parent
_SCRIPTS = ("errors.js", "tables.js")
# About 130 bytes each: of a longer run's steps the page carries every so many.
_MOST_STEPS = 100_000


def write_report(folder: Path) -> Path:
    """Write the page of a run's folder anew, whole or not at all, and that of its profile beside it. Its path.

    Raises ValueError where there is no run, or one that has not begun, OSError where a file cannot be written.
    Cost: reading metrics.jsonl, some 20 microseconds a line, and the profile.
    """
    page = folder / PAGE
    new = page.with_name(PAGE + ".new")
    new.write_text(_render(folder), encoding="utf-8")
    os.replace(new, page)
    return page


def _render(folder: Path) -> str:
    metrics = read_metrics(folder)
    if not metrics.starts:
        raise ValueError(f"{folder} is no folder of a run, or of one that has not begun: {NAME} says nothing there")
    scripts = [(_SHARED / name).read_text(encoding="utf-8") for name in _SCRIPTS]
    # No script but ours runs, whatever a run's texts hold; pictures are in the page itself.
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {' '.join(map(hash_of, scripts))}"
    )
    styles = [(place / "style.css").read_text(encoding="utf-8") for place in (_SHARED, Path(__file__).parent)]
    first, *later = (f"<script>{script}</script>" for script in scripts)
    sections = "".join(
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{title}</h2>{body}</section>'
        for name, title, body in (
            ("pictures", "What the model makes of what it has never seen", pictures(folder)),
            ("curves", "How it went", curves(metrics)),
            ("happened", "What happened", happened(metrics)),
            ("communication", "Communication", communication(folder)),
            ("recipe", "Recipe and environment", made_with(folder)),
        )
        if body
    )
    recipe = metrics.starts[-1]["recipe"]
    facts = "".join(
        f"<div><strong>{escape(number)}</strong><span>{escape(meaning)}</span></div>"
        for number, meaning in _facts(metrics)
    )
    every = max(1, -(-len(metrics.steps) // _MOST_STEPS))
    numbers = {
        "starts": metrics.starts,
        "steps": columns(metrics.steps[::every]),
        "evaluations": metrics.evaluations,
        "notes": metrics.notes,
        "ended": metrics.ended,
    }
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>netfold train: {escape(folder.name)}</title>
<style>{"".join(styles)}</style>
{first}
</head>
<body>
<main>
<h1>{escape(_headline(metrics))}</h1>
<p class="command">{escape(folder.name)}: {escape(recipe["model"]["name"])} on {escape(recipe["data"]["name"])}</p>
{_end(metrics)}
<div class="facts">{facts}</div>
{sections}
{_carried(every)}
</main>
{embed("metrics", numbers)}
{"".join(later)}
</body>
</html>
"""


def _headline(metrics: Metrics) -> str:
    metric = metrics.starts[-1]["metric"]
    if not metrics.evaluations:
        return "Held-out samples were not looked at yet."
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
    return f'<p class="quiet">Of the steps this file carries the numbers of one in {every}; {NAME} has all.</p>'


def _facts(metrics: Metrics) -> list[tuple[str, str]]:
    start, steps = metrics.starts[-1], metrics.steps
    done = steps[-1]["step"] if steps else start["step"]
    found = [
        (f"{done:,}", f"of {start['steps']:,} steps, {start['batch']:,} samples each"),
        (f"{start['ranks']:,}", f"{'rank' if start['ranks'] == 1 else 'ranks'}; {start['parameters']:,} parameters"),
    ]  # fmt: skip
    if steps:
        seconds = sorted(line["seconds"] for line in steps)
        median = seconds[len(seconds) // 2]
        rate = f"{start['batch'] / median:.4g} samples a second"
        found.append((units.seconds(median), f"a step, the median: {rate}"))
        took = sum(seconds) * (steps[-1]["step"] / len(steps)) + sum(line["seconds"] for line in metrics.evaluations)
        found.append((units.seconds(took), "in steps and evaluations that count"))
    return found
