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
    once: Annotated[bool, typer.Option("--once", help="One picture after one interval, then end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A line of JSON an interval, a list of groups.")] = False,
    interval_s: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds a picture is of.")] = 1.0,
) -> None:
    """What the ranks of running jobs do, how much, and who is last: from outside, at no cost to the job.

    exposed: of the time in which an operation was under way, the share in which the training thread did not compute; an
    estimate by sampling. Ends when the jobs do, or by control-C.
    """
    from rich.console import Console
    from rich.live import Live

    from netfold.diagnostics import Sampler

    console = Console()
    with (
        contextlib.closing(Sampler(pid)) as watch,
        contextlib.ExitStack() as stack,
        contextlib.suppress(KeyboardInterrupt),
    ):
        live: Live | None = None
        seen = False
        while True:
            pictures = watch.snapshot(interval_s)
            if not pictures:
                stack.close()
                typer.echo("the job has ended" if seen else NOBODY, err=as_json)
                return
            seen = True
            if as_json:
                typer.echo(_json(pictures))
            elif once or not console.is_terminal:
                _print(console, pictures)
            elif live is None:
                live = stack.enter_context(Live(_view(pictures), console=console, auto_refresh=False))
            else:
                live.update(_view(pictures), refresh=True)
            if once:
                return


def _view(pictures: list[Snapshot]) -> Any:
    import time

    from netfold.diagnostics import View

    return View(pictures, time.monotonic_ns())


def _print(console: Any, pictures: list[Snapshot]) -> None:
    console.print(_view(pictures), soft_wrap=False, highlight=False)


def _json(pictures: list[Snapshot]) -> str:
    import json
    from dataclasses import asdict

    return json.dumps([asdict(picture) for picture in pictures])
