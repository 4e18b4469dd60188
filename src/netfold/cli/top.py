"""`netfold top`: running jobs of this machine, live."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from netfold.diagnostics import Snapshot

NOBODY = "no group of netfold on this machine that this user may look at"


def top(
    pid: Annotated[int | None, typer.Option(help="Only the groups that this process has a rank of.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one snapshot after one interval, then end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON for each interval, a list of groups.")
    ] = False,
    interval_s: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds of a snapshot.")] = 1.0,
) -> None:
    """Show the activity and rates of all ranks of running jobs, and the slowest rank, at no cost to the job.

    exposed: share of the time with an operation under way in which the training thread did not compute; an estimate by
    sampling. Ends when the jobs end, or by control-C.
    """
    from rich.console import Console
    from rich.live import Live

    from netfold.diagnostics import Sampler

    console = Console()
    with (
        contextlib.closing(Sampler(pid)) as sampler,
        contextlib.ExitStack() as stack,
        contextlib.suppress(KeyboardInterrupt),
    ):
        live: Live | None = None
        seen = False
        while True:
            snapshots = sampler.snapshot(interval_s)
            if not snapshots:
                stack.close()
                typer.echo("the job has ended" if seen else NOBODY, err=as_json)
                return
            seen = True
            if as_json:
                typer.echo(_json(snapshots))
            elif once or not console.is_terminal:
                console.print(_view(snapshots), soft_wrap=False, highlight=False)
            elif live is None:
                live = stack.enter_context(Live(_view(snapshots), console=console, auto_refresh=False))
            else:
                live.update(_view(snapshots), refresh=True)
            if once:
                return


def _view(snapshots: list[Snapshot]) -> Any:
    import time

    from netfold.diagnostics import View

    return View(snapshots, time.monotonic_ns())


def _json(snapshots: list[Snapshot]) -> str:
    import json
    from dataclasses import asdict

    return json.dumps([asdict(snapshot) for snapshot in snapshots])
