"""`netfold demo`: the whole story in about two minutes."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from netfold.extras import need

# Exit code, as a shell's: the command line is wrong, or this machine cannot run it.
CANNOT = 2
NEEDED = ("torch", "skimage", "PIL", "pydantic")


def demo(
    ranks: Annotated[int | None, typer.Option(min=2, help="Ranks.", show_default="4; 2 with --quick")] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Training steps over each backend.", show_default="200; 120 with --quick"),
    ] = None,
    out: Annotated[Path, typer.Option("-o", help="Folder for report.html.")] = Path("netfold-demo"),
    quick: Annotated[bool, typer.Option("--quick", help="A much smaller network, for some seconds.")] = False,
) -> None:
    """Train a super-resolution network through a switch on this machine, then with gloo, and compare.

    Writes report.html. The exit code is 0 when the network beats bicubic enlargement on held-out photographs and
    both backends gave the same losses but for rounding, else 1, saying which.
    """
    from rich.console import Console

    need("netfold demo", NEEDED, "demo")

    from netfold.demo import experiment, render, report
    from netfold.demo.launch import LaunchError
    from netfold.demo.settings import SMALLEST, Training

    started_s = time.monotonic()
    chosen = {"workers": ranks, "steps": steps}
    try:
        training = replace(
            SMALLEST if quick else Training(), **{name: value for name, value in chosen.items() if value is not None}
        )
    except ValueError as error:
        typer.echo(f"netfold demo: {error}", err=True)
        raise typer.Exit(CANNOT) from None
    try:
        out.mkdir(parents=True, exist_ok=True)  # fail now, not after two minutes of training
    except OSError as error:
        typer.echo(f"netfold demo: -o {out}: {error.strerror}; name a folder that can be made", err=True)
        raise typer.Exit(CANNOT) from None
    console = Console()
    runs = experiment.runs_over_netfold(training) + experiment.runs_over_gloo(training)
    try:
        with render.Steps(console, runs) as watched:
            told = experiment.run_experiment(training, watched.stepped)
    except LaunchError as error:
        typer.echo(f"netfold demo: {error}", err=True)
        raise typer.Exit(1) from None
    failures = told.failures()
    try:
        page = str(report.write(told, out, time.monotonic() - started_s))
    except OSError as error:
        page = "not written"
        failures = [*failures, f"the report could not be written to {out}: {error.strerror}"]
    render.print_summary(console, told, page)
    for failure in failures:
        typer.echo(f"netfold demo: {failure}", err=True)
    raise typer.Exit(1 if failures else 0)
