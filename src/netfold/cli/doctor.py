"""`netfold doctor`: what is wrong, seen from outside."""

from typing import Annotated

import typer

app = typer.Typer(help="What is wrong, seen from outside.", no_args_is_help=True)

# Somebody keeps the others.
FOUND = 1


@app.callback()
def doctor() -> None:
    """What is wrong, seen from outside."""


@app.command()
def job(pid: Annotated[int | None, typer.Option(help="Look at the groups of this process only.")] = None) -> None:
    """What each rank of the jobs on this machine is doing, and who keeps the others. Exit code 1 if somebody does."""
    import time

    from rich.console import Console
    from rich.table import Table

    from netfold.doctor import diagnose, find_ranks

    ranks = find_ranks()
    if pid is not None:
        jobs = {rank.job for rank in ranks if rank.pid == pid}
        ranks = [rank for rank in ranks if rank.job in jobs]
    if not ranks:
        typer.echo("no group of netfold on this machine that this user may look at")
        return
    console = Console()
    verdicts = diagnose(ranks, time.monotonic_ns())
    pids = {(rank.job, rank.rank): rank.pid for rank in ranks}
    for verdict in verdicts:
        table = Table("rank", "process", "is", title=f"group of {verdict.size}", title_justify="left")
        for number, doing in verdict.lines:
            table.add_row(str(number), str(pids[verdict.job, number]), doing)
        console.print(table)
        for finding in verdict.findings:
            console.print(f"  {finding}", soft_wrap=True, highlight=False)
    if any(verdict.at_fault for verdict in verdicts):
        raise typer.Exit(FOUND)
