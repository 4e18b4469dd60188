"""The profile as one HTML file: findings, and pictures of the run's operations.

    text        headline, facts and limitations     by_size    operations by size: a table, bars, scatter plots
    steps       training steps over time            ranks      stragglers and clocks
    timeline    all ranks over time, drawn by timeline.js

The `<script type="application/json" id="findings">` has all findings, for other programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from netfold import units
from netfold.page.escape import embed, escape, items, terms
from netfold.page.layout import render_layout
from netfold.profile.findings import Findings, Overlap
from netfold.profile.page import by_size, ranks
from netfold.profile.page import text as text_module
from netfold.profile.page.steps import steps
from netfold.profile.page.timeline import timeline
from netfold.profile.run import Run
from netfold.profile.table import registrations_text

__all__ = ["advice", "render_page"]

_NO_RECORDS = "<p>The run's records are not available here: this page shows only the findings.</p>"


def render_page(findings: Findings, run: Run | None, *, each_step: Sequence[Overlap] = ()) -> str:
    """Return the page. Size: below 3 MB for up to some thousand ranks.

    run: the run of the findings; None: the sections that need single operations say that they are missing.
    each_step: the mean over ranks of each step, in order.
    """
    kept = registrations_text(findings)
    rows = by_size.rows(findings.rows) if findings.rows else "<p>None.</p>"
    rows += f"<p>{escape(kept)}.</p>" if kept else ""
    pictures = by_size.pictures(findings.rows) + (_NO_RECORDS if run is None else by_size.scatter(run))
    step_times = (
        "<p>No steps were marked: their times are not known.</p>"
        if findings.steps is None
        else steps(findings.steps, each_step)
    )
    lost = "None: every operation that ended was written."
    if findings.lost:
        lost = f"{units.count(findings.lost)} operations of all ranks came faster than they could be written."
    return render_layout(
        title=f"netfold profile: {findings.title}",
        headline=text_module.headline(findings),
        opening=f"""<p class="command"><code>{escape(findings.title)}</code><br>
{escape(text_module.ranks(findings))}</p>
{limitations(findings)}
<p>{escape(text_module.summary(findings))}</p>""",
        facts=text_module.facts(findings),
        sections=[
            ("advice", "What to do", advice(findings)),
            ("rows-section", "Operations by size", rows),
            ("by-size-section", "Where time goes, by size", pictures),
            ("steps-section", "Steps of training", step_times),
            ("lateness-section", "Who waited for whom", ranks.straggler_table(findings.stragglers)),
            ("clocks-section", "Clocks", ranks.clock_table(findings.clocks)),
            ("timeline", "All ranks over time", _NO_RECORDS if run is None else _timeline(findings, run)),
            (
                "blind",
                "What is not in these records",
                items(findings.coverage_gaps) or "<p>No rank reported a gap.</p>",
            ),
            ("lost", "Lost records", f"<p>{lost}</p>"),
            ("versions", "Versions", terms(findings.versions.items()) if findings.versions else "<p>Not known.</p>"),
        ],
        data=("findings", findings),
        scripts=[Path(__file__).with_name("timeline.js")],
    )


def limitations(findings: Findings) -> str:
    """Warnings that come before all numbers, as HTML."""
    return "".join(f'<p class="failed">{escape(text)}.</p>' for text in findings.limitations())


def advice(findings: Findings) -> str:
    """The advice as a list, as HTML."""
    if not findings.advice:
        return "<p>Nothing stands out.</p>"
    found = "".join(
        f'<li><span class="tag{"" if each.prediction else " measured"}">'
        f"{'predicted, not measured' if each.prediction else 'measured'}</span> {escape(each.text)}</li>"
        for each in findings.advice
    )
    return f'<ul class="advice">{found}</ul>'


def _timeline(findings: Findings, run: Run) -> str:
    drawn = timeline(run, findings.clocks, findings.stragglers)
    if drawn is None:
        return "<p>No operation was recorded.</p>"
    key, below = "", "The training threads were not watched: when they computed is not known."
    if drawn.watched:
        key = '<span><i class="ink-computing"></i>training thread computes</span>'
        below = "Below a rank's operations: when its training thread computed. Exposed operations have nothing below."
    buttons = "".join(
        f'<button type="button" data-command="{command}">{text}</button>'
        for command, text in (
            *(("+", "zoom in"), ("-", "zoom out")),
            *(("ArrowLeft", "earlier"), ("ArrowRight", "later"), ("0", "all")),
        )
    )
    header = ("rank", "operation", "bytes", "began", "took", "number", "group", "algorithm", "wire")
    return f"""<p>{escape(" ".join(drawn.notes))}</p>
<div class="legend" id="timeline-key">{key}</div>
<div class="tools"><span id="timeline-windows" role="group" aria-label="part of the run"></span>{buttons}</div>
<div id="timeline-scroller"><canvas id="timeline-canvas" tabindex="0" role="img" aria-label="operations of all ranks
over time; a table below lists the operations in view" aria-describedby="timeline-shown"></canvas></div>
<p id="timeline-shown" class="quiet">A script draws this picture.</p>
<p id="timeline-picked" aria-live="polite"></p>
<p class="quiet">Drag to move. To zoom, pinch, turn the wheel with Ctrl, or use the keys + − 0 ← →. A touched operation
is described and joined with the same operation on other ranks. {below} Shaded: steps.</p>
<details id="timeline-details"><summary>The operations in view, as a table</summary>
<table id="timeline-list"><caption></caption>
<thead><tr>{"".join(f'<th scope="col">{name}</th>' for name in header)}</tr></thead><tbody></tbody></table></details>
{embed("timeline-data", drawn.data)}"""
