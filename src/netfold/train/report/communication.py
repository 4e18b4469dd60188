"""What the profile of a stretch of steps found, in short; all of it is on a page of its own beside this one."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from netfold.plan.advice import advise
from netfold.profile.analyse import analyse
from netfold.profile.overlap import each_step
from netfold.profile.page import advice, render_page
from netfold.profile.page import text as text_module
from netfold.profile.page.escape import escape
from netfold.profile.page.layout import facts_of
from netfold.profile.run import Run, RunError, Trace, read_run
from netfold.train.callbacks.profiling import NAME

PAGE = "profile.html"


def communication(folder: Path) -> str:
    """Writes the profile's page, too."""
    if not (folder / NAME).is_dir():
        return (
            "<p>No steps were recorded here: report.profile is off, the run was too short or has not come so far, or "
            "all of the job is recorded elsewhere (netfold profile run).</p>"
        )
    try:
        run = _steps_alone(read_run(folder / NAME))
    except RunError as error:
        return f"<p>No profile: {escape(error)}</p>"
    findings = analyse(run)
    findings = replace(findings, advice=advise(run, findings))
    new = folder / f"{PAGE}.new"
    new.write_text(render_page(findings, run, each_step=each_step(run)), encoding="utf-8")
    os.replace(new, folder / PAGE)
    steps = f"{findings.steps.count} steps were recorded. " if findings.steps is not None else ""
    missing = "".join(f'<p class="failed">{escape(text)}</p>' for text in text_module.limitations(findings))
    return (
        f"<p>{steps}{escape(text_module.headline(findings))}</p>{missing}"
        f'<div class="facts">{facts_of(text_module.facts(findings))}</div>{advice(findings)}'
        f'<p><a href="{PAGE}">All of the profile</a></p>'
    )


def _steps_alone(run: Run) -> Run:
    """Without what came before the first step: a recording begins with what its groups still know of earlier times."""
    return replace(run, traces=[_from_first_step(trace) for trace in run.traces])


def _from_first_step(trace: Trace) -> Trace:
    if not len(trace.steps):
        return trace
    began_ns, ended_ns = trace.steps["began_ns"][0], trace.steps["ended_ns"][-1]
    operations, progress = trace.operations, trace.progress
    return replace(
        trace,
        operations=operations[(operations["queued_ns"] >= began_ns) & (operations["queued_ns"] < ended_ns)],
        progress=progress[(progress["at_ns"] >= began_ns) & (progress["at_ns"] <= ended_ns)],
    )
