"""`netfold profile`: where a training job's time on the network goes."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Where a training job's time on the network goes.", no_args_is_help=True)

CANNOT = 2


@app.callback()
def profile() -> None:
    """Where a training job's time on the network goes."""


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="The folder that `netfold profile run` left.")],
    perfetto: Annotated[bool, typer.Option("--perfetto", help="For ui.perfetto.dev and chrome://tracing.")] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="RUN.perfetto.json here, if not said.")] = None,
) -> None:
    """Write a run for another tool: every operation, step and arrow between ranks, not only what a page can hold."""
    from netfold.profile.findings import ClockOffset
    from netfold.profile.perfetto import write_trace
    from netfold.profile.run import read_run

    file = output or Path(f"{run.resolve().name}.perfetto.json")
    try:
        if not perfetto:
            raise ValueError("say for which tool: --perfetto is the one there is")
        found = read_run(run)
        # Ranks of one host have one CLOCK_MONOTONIC.
        host = found.traces[0].about.host
        clocks = [ClockOffset(trace.about.rank, 0, 0) for trace in found.traces if trace.about.host == host]
        count = write_trace(found, clocks, file)
    except ValueError as error:
        typer.echo(f"netfold profile export: {error}", err=True)
        raise typer.Exit(CANNOT) from None
    except OSError as error:
        typer.echo(f"netfold profile export: {file} cannot be written: {error.strerror}", err=True)
        raise typer.Exit(CANNOT) from None
    apart = sorted({trace.about.rank for trace in found.traces} - {clock.rank for clock in clocks})
    if apart:
        typer.echo(f"not on {host}, and shown by their own clocks: ranks {', '.join(map(str, apart))}", err=True)
    typer.echo(f"{file}: {count:,} events; open it in https://ui.perfetto.dev")
