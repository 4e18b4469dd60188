"""`netfold demo`: train over a switch and over gloo, and compare, in about two minutes."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from netfold.cli.verb import FAILED, exit_on
from netfold.extras import need

NEEDED = ("torch", "skimage", "PIL", "pydantic")


def demo(
    ranks: Annotated[int | None, typer.Option(min=2, help="Ranks.", show_default="4; 2 with --quick")] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Training steps over each backend.", show_default="200; 120 with --quick"),
    ] = None,
    out: Annotated[Path, typer.Option("-o", help="Folder for report.html.")] = Path("netfold-demo"),
    quick: Annotated[bool, typer.Option("--quick", help="A much smaller network; takes seconds.")] = False,
) -> None:
    """Train a super-resolution network through a switch on this machine, then with gloo, and compare.

    Writes report.html. The exit code is 0 if the network beats bicubic enlargement on held-out photographs and both
    backends gave the same losses except for rounding. Otherwise it is 1, and stderr names the condition that failed.
    """
    from netfold.console import plain_console

    need("netfold demo", NEEDED, "lab")

    from netfold_lab.demo import experiment, render, report
    from netfold_lab.demo.launch import LaunchError
    from netfold_lab.demo.settings import SMALLEST, Training

    started_s = time.monotonic()
    chosen = {"workers": ranks, "steps": steps}
    with exit_on("demo", ValueError, OSError):
        training = replace(
            SMALLEST if quick else Training(), **{name: value for name, value in chosen.items() if value is not None}
        )
        out.mkdir(parents=True, exist_ok=True)  # fail now, not after two minutes of training
    console = plain_console()
    runs = experiment.runs_over_netfold(training) + experiment.runs_over_gloo(training)
    with exit_on("demo", LaunchError, code=FAILED), render.Steps(console, runs) as steps_shown:
        result = experiment.run_experiment(training, steps_shown.stepped)
    failures = result.failures()
    try:
        page = str(report.write(result, out, time.monotonic() - started_s))
    except OSError as error:
        page = "not written"
        failures = [*failures, f"the report could not be written to {out}: {error.strerror}"]
    render.print_summary(console, result, page)
    for failure in failures:
        typer.echo(f"netfold demo: {failure}", err=True)
    raise typer.Exit(FAILED if failures else 0)
