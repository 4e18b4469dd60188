"""`netfold doctor`: what is wrong, before a job and in one that hangs; which fabrics there are."""

from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(help="What is wrong, before a job and in one that hangs.", no_args_is_help=True)

# Somebody keeps the others.
FOUND = 1


@app.callback()
def doctor() -> None:
    """What is wrong, before a job and in one that hangs."""


@app.command()
def job(pid: Annotated[int | None, typer.Option(help="Look at the groups of this process only.")] = None) -> None:
    """What each rank of the jobs on this machine is doing, and who keeps the others. Exit code 1 if somebody does."""
    import time

    from rich.console import Console
    from rich.table import Table

    from netfold.diagnostics import diagnose, find_ranks

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


@app.command()
def gpu() -> None:
    """The GPUs of this host, and whether ranks here reach each other's memory there, or why not: two ranks try it. Exit
    code 1 where they do not."""
    from netfold.torch.device.selftest import run_selftest

    lines, fine = run_selftest()
    typer.echo("\n".join(lines))
    if not fine:
        raise typer.Exit(FOUND)


@app.command()
def check(
    folder: Annotated[Path | None, typer.Option(help="Where the job will write; the working directory.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that other ranks may take to come.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Facts and findings as JSON.")] = False,
) -> None:
    """Before a job: this host, or under a launcher (torchrun, srun, mpirun) every rank's host, the links between them
    and the switches of NETFOLD_SWITCH, with what they and one more are worth; what is wrong and what to do. Exit code 1
    where the job would fail."""
    import json
    from dataclasses import asdict

    from rich.console import Console

    from netfold.bootstrap import launchers
    from netfold.communicator import Communicator, Options
    from netfold.diagnostics.preflight import advise, apply_rules, check_alone, check_ranks, failed, print_report
    from netfold.errors import NetfoldError

    # Links are what is measured first; each switch is joined by itself, for a moment, where it has room.
    own: dict[str, Any] = {"options": Options(switch=""), "timeout_s": timeout, "join_timeout_s": timeout}
    try:
        if launchers.is_launched():
            with Communicator.from_environment(**own) as communicator:
                gathered, rank = check_ranks(communicator, folder, capacity=True), communicator.rank
        else:
            gathered, rank = check_alone(folder), 0
    except (NetfoldError, ValueError) as error:
        typer.echo(f"netfold doctor check: {error}", err=True)
        raise typer.Exit(FOUND) from None
    findings = [*apply_rules(gathered), *advise(gathered)]
    if rank == 0 and as_json:
        told = [{**asdict(finding), "level": finding.level.value} for finding in findings]
        typer.echo(json.dumps({**asdict(gathered), "findings": told}))
    elif rank == 0:
        print_report(Console(), gathered, findings)
    if failed(findings):
        raise typer.Exit(FOUND)


@app.command()
def fabric(as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """What libfabric offers on this host for NETFOLD_TRANSPORT=fabric:PROVIDER, and why a provider cannot be used. Exit
    code 1 where none can."""
    import json
    from dataclasses import asdict

    from rich.console import Console
    from rich.table import Table

    from netfold.diagnostics import fabric as looked_at

    version, why_not = looked_at.library()
    if why_not:
        typer.echo(json.dumps({"libfabric": None, "why_not": why_not}) if as_json else f"no fabric: {why_not}")
        raise typer.Exit(FOUND)
    found = looked_at.providers()
    if as_json:
        typer.echo(json.dumps({"libfabric": version, "providers": [asdict(each) for each in found]}))
    else:
        table = Table("provider", "version", "over", "", title=f"libfabric {version}", title_justify="left", box=None)
        for each in found:
            said = f"[red]cannot be used: {each.why_not}[/]" if each.why_not else ", ".join(each.can)
            table.add_row(each.name, each.version, ", ".join(each.devices), said)
        Console().print(table)
    if all(each.why_not for each in found):
        raise typer.Exit(FOUND)
