"""`netfold top`: running jobs of this machine, live."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated

import typer

from netfold.cli.output import STDOUT_TABLE, Output, with_output
from netfold.cli.verb import time_option

if TYPE_CHECKING:
    from netfold.diagnostics.sampler import Snapshot
    from netfold.diagnostics.top import View


@with_output("json")
def top(
    output: Output,
    pid: Annotated[int | None, typer.Option(help="Only the groups that this process has a rank of.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one snapshot, then end; so does -o.")] = False,
    interval: float = time_option("1s", least_s=0.1, help="Duration of a snapshot."),
) -> None:
    """Show the activity and rates of all ranks of running jobs, and the slowest rank, at no cost to the job.

    exposed: share of the time with an operation under way in which the training thread did not compute; an estimate by
    sampling. Ends when the jobs end, or by control-C. `--output json` prints a line for each interval, a list of
    groups.
    """
    import time

    from rich.live import Live

    from netfold.console import plain_console
    from netfold.diagnostics.sampler import Sampler
    from netfold.diagnostics.top import View

    console = plain_console()
    with (
        contextlib.closing(Sampler(pid)) as sampler,
        contextlib.ExitStack() as stack,
        contextlib.suppress(KeyboardInterrupt),
    ):
        live: Live | None = None
        seen = False
        while snapshots := sampler.snapshot(interval):
            seen = True
            view = View(snapshots, time.monotonic_ns())
            if once or output != STDOUT_TABLE or not console.is_terminal:
                _show(output, view, snapshots)
            elif live is None:
                live = stack.enter_context(Live(view, console=console, auto_refresh=False))
            else:
                live.update(view, refresh=True)
            if once or output.file is not None:
                return
        stack.close()
        if seen:
            typer.echo("the job has ended", err=output.form != "table")
        else:
            output.show("no group of netfold on this machine that this user may look at", json=lambda: "[]")


def _show(output: Output, view: View, snapshots: list[Snapshot]) -> None:
    import json
    from dataclasses import asdict

    output.show(
        lambda console: console.print(view, soft_wrap=False, highlight=False),
        json=lambda: json.dumps([asdict(snapshot) for snapshot in snapshots]),
    )
