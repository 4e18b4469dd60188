"""The main figures of the run's profile of some steps. A page of its own has all of the profile."""

from __future__ import annotations

from pathlib import Path

from netfold.page.escape import escape
from netfold.page.layout import facts_of
from netfold.profile.analyse import analyse
from netfold.profile.overlap import each_step
from netfold.profile.page import advice, limitations, render_page, text
from netfold.profile.run import RunError, read_run
from netfold.profile.window import in_steps
from netfold.tuning.advice import advise
from netfold_train.runs import PROFILE, write_whole

PAGE = "profile.html"


def communication(folder: Path) -> str:
    """Return the section, and write the profile's page."""
    if not (folder / PROFILE).is_dir():
        return (
            "<p>No steps were recorded here: report.profile is off, the run is too short so far, or "
            "<code>netfold profile run</code> records the whole job elsewhere.</p>"
        )
    try:
        run = in_steps(read_run(folder / PROFILE))
    except RunError as error:
        return f"<p>No profile: {escape(error)}</p>"
    findings = advise(run, analyse(run))
    write_whole(folder / PAGE, render_page(findings, run, each_step=each_step(run)))
    steps = f"{findings.steps.count} steps were recorded. " if findings.steps is not None else ""
    return (
        f"<p>{steps}{escape(text.headline(findings))}</p>{limitations(findings)}{facts_of(text.facts(findings))}"
        f'{advice(findings)}<p><a href="{PAGE}">All of the profile</a></p>'
    )
