"""The profile as one HTML file.

    sheet      what every page is              table, chart   the page's two kinds of picture
    units      numbers for people              by_size, clouds, steps, ranks, timeline   a section each
    words      sentences                       plain   values on their way into HTML

It shows `Findings`; from a `Run` it draws what needs every operation. `<script type="application/json" id="findings">`
carries the findings whole, for whoever wants the numbers back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from netfold.profile.findings import Findings, Overlap
from netfold.profile.page import by_size, ranks, units
from netfold.profile.page import text as text_module
from netfold.profile.page.escape import embed, escape
from netfold.profile.page.layout import render_layout
from netfold.profile.page.scatter import scatter
from netfold.profile.page.steps import steps
from netfold.profile.page.timeline import timeline
from netfold.profile.run import Run
from netfold.profile.table import registrations_text

__all__ = ["advice", "render_page"]

_FOLDER = Path(__file__).parent


def render_page(findings: Findings, run: Run | None, *, each_step: Sequence[Overlap] = ()) -> str:
    """The page. run: what the findings are of; without it the sections that need single operations say so.

    each_step: of each step in its order, a rank's. Cost: below 3 MB, whatever the run, up to some thousand ranks.
    """
    failed = "".join(f'<p class="failed">{escape(text)}</p>' for text in text_module.limitations(findings))
    return render_layout(
        title=f"netfold profile: {findings.title}",
        headline=text_module.headline(findings),
        opening=f"""<p class="command"><code>{escape(findings.title)}</code><br>{_who(findings)}</p>
{failed}
<p>{escape(text_module.summary(findings))}</p>""",
        facts=text_module.facts(findings),
        sections=_sections(findings, run, each_step),
        data=("findings", findings),
        scripts=[_FOLDER / "timeline.js"],
    )


def _sections(findings: Findings, run: Run | None, each_step: Sequence[Overlap]) -> list[tuple[str, str, str]]:
    without = "<p>The records themselves are not at hand: only what was found in them is shown.</p>"
    drawn = None if run is None else _timeline(findings, run)
    kept = registrations_text(findings)
    return [
        ("advice", "What to do", advice(findings)),
        (
            "rows-section",
            "Operations by size",
            (by_size.rows(findings.rows) if findings.rows else "<p>None.</p>")
            + (f"<p>{escape(kept)}.</p>" if kept else ""),
        ),
        (
            "by-size-section",
            "Where time goes, by size",
            (by_size.pictures(findings.rows) if findings.rows else "") + (without if run is None else scatter(run)),
        ),
        (
            "steps-section",
            "Steps of training",
            "<p>Nobody marked steps: their times are not known.</p>"
            if findings.steps is None
            else steps(findings.steps, each_step),
        ),
        ("lateness-section", "Who waited for whom", ranks.straggler_table(findings.stragglers)),
        ("clocks-section", "Clocks", ranks.clock_table(findings.clocks)),
        ("timeline", "All ranks over time", without if drawn is None else drawn),
        ("blind", "What is not in these records", _list(findings.coverage_gaps, "No rank named anything.")),
        ("lost", "Lost records", _lost(findings)),
        ("versions", "Versions", _terms(findings.versions)),
    ]


def _who(findings: Findings) -> str:
    number = f"{len(findings.ranks)} ranks" if len(findings.ranks) != 1 else "1 rank"
    parts = [
        f"{number} of a job of {findings.size}",
        f"hosts: {', '.join(findings.hosts)}" if findings.hosts else "",
        f"backends: {', '.join(findings.backends)}" if findings.backends else "",
        f"recorded by: {', '.join(findings.sources)}" if findings.sources else "",
    ]
    return escape("; ".join(part for part in parts if part))


def advice(findings: Findings) -> str:
    """What to do, as a list."""
    if not findings.advice:
        return "<p>Nothing stands out.</p>"
    items = "".join(
        f'<li><span class="tag{"" if each.prediction else " measured"}">'
        f"{'predicted, not measured' if each.prediction else 'measured'}</span> {escape(each.text)}</li>"
        for each in findings.advice
    )
    return f'<ul class="advice">{items}</ul>'


def _timeline(findings: Findings, run: Run) -> str:
    drawn = timeline(run, findings.clocks, findings.stragglers)
    if drawn is None:
        return "<p>No operation was recorded.</p>"
    key, below = "", "Nobody watched the training threads: when they computed is not known."
    if drawn.watched:
        key = '<span><i class="computing"></i>training thread computes</span>'
        below = "Below a rank's operations: when its training thread computed; with nothing below it, one is exposed."
    return f"""<p>{escape(" ".join(drawn.said))}</p>
<div class="legend" id="timeline-key">{key}</div>
<div class="tools"><span id="timeline-windows" role="group" aria-label="part of the run"></span>
<button type="button" data-command="+">zoom in</button><button type="button" data-command="-">zoom out</button>
<button type="button" data-command="ArrowLeft">earlier</button>
<button type="button" data-command="ArrowRight">later</button>
<button type="button" data-command="0">all</button></div>
<div id="timeline-scroller"><canvas id="timeline-canvas" tabindex="0" role="img" aria-label="operations of all ranks
over time; the operations in view are listed as a table below" aria-describedby="timeline-shown"></canvas></div>
<p id="timeline-shown" class="quiet">This picture is drawn by a script.</p>
<p id="timeline-picked" aria-live="polite"></p>
<p class="quiet">Drag to move, pinch or Ctrl and wheel to zoom, or with the keys + − 0 ← →. A touched operation is
described, and joined with its counterparts on other ranks. {below} Shaded: steps.</p>
<details id="timeline-details"><summary>The operations in view, as a table</summary>
<table id="timeline-list"><caption></caption><thead><tr><th scope="col">rank</th><th scope="col">operation</th>
<th scope="col">bytes</th><th scope="col">began</th><th scope="col">took</th><th scope="col">number</th>
<th scope="col">group</th><th scope="col">algorithm</th><th scope="col">wire</th></tr></thead><tbody></tbody></table>
</details>
{embed("timeline-data", drawn.data)}"""


def _list(sentences: Sequence[str], otherwise: str) -> str:
    if not sentences:
        return f"<p>{escape(otherwise)}</p>"
    return f'<ul class="plain">{"".join(f"<li>{escape(each)}</li>" for each in sentences)}</ul>'


def _lost(findings: Findings) -> str:
    if findings.lost == 0:
        return "<p>None: every operation that ended was written.</p>"
    return (
        f"<p>{escape(units.count(findings.lost))} operations of all ranks came faster than they could be written.</p>"
    )


def _terms(versions: Mapping[str, str]) -> str:
    if not versions:
        return "<p>No rank named any.</p>"
    terms = "".join(f"<dt>{escape(name)}</dt><dd>{escape(version)}</dd>" for name, version in versions.items())
    return f"<dl>{terms}</dl>"
