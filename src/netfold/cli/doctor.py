"""`netfold doctor`: find out what is wrong before a job or in a hanging job, and list fabrics."""

from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(help="Find out what is wrong, before a job or in a job that hangs.", no_args_is_help=True)

# Exit code: the command found a problem.
FOUND = 1


@app.callback()
def doctor() -> None:
    """Find out what is wrong, before a job or in a job that hangs."""


@app.command()
def job(pid: Annotated[int | None, typer.Option(help="Look at the groups of this process only.")] = None) -> None:
    """Show what each rank on this machine is doing, and which ranks delay the others. Exit code 1 if any does."""
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
    """List this host's GPUs, and test with two ranks whether they reach each other's GPU memory. Exit code 1 if not."""
    from netfold.torch.device.selftest import run_selftest

    lines, fine = run_selftest()
    typer.echo("\n".join(lines))
    if not fine:
        raise typer.Exit(FOUND)


@app.command()
def check(
    folder: Annotated[
        Path | None, typer.Option(help="Folder that the job will write to; default: the working directory.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for other ranks.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print facts and findings as JSON.")] = False,
) -> None:
    """Check this host before a job and name remedies. Exit code 1 if the job would fail.

    Under a launcher (torchrun, srun, mpirun): check every rank's host, the links between hosts and the switches of
    NETFOLD_SWITCH, and estimate the gain of these switches and of one more.
    """
    import json
    from dataclasses import asdict

    from rich.console import Console

    from netfold.bootstrap import launchers
    from netfold.communicator import Communicator, Options
    from netfold.diagnostics.preflight import advise, apply_rules, check_alone, check_ranks, failed, print_report
    from netfold.errors import NetfoldError

    # Measure the links without a switch. Afterwards a short-lived group joins each switch that has free quota.
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
        as_dicts = [{**asdict(finding), "level": finding.level.value} for finding in findings]
        typer.echo(json.dumps({**asdict(gathered), "findings": as_dicts}))
    elif rank == 0:
        print_report(Console(), gathered, findings)
    if failed(findings):
        raise typer.Exit(FOUND)


@app.command()
def fabric(as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """List libfabric's providers on this host for NETFOLD_TRANSPORT=fabric:PROVIDER, and why some cannot be used.

    Exit code 1 if none can be used.
    """
    import json
    from dataclasses import asdict

    from rich.console import Console
    from rich.table import Table

    from netfold.diagnostics import fabric as libfabric

    version, why_not = libfabric.library()
    if why_not:
        typer.echo(json.dumps({"libfabric": None, "why_not": why_not}) if as_json else f"no fabric: {why_not}")
        raise typer.Exit(FOUND)
    providers = libfabric.providers()
    if as_json:
        typer.echo(json.dumps({"libfabric": version, "providers": [asdict(each) for each in providers]}))
    else:
        table = Table("provider", "version", "over", "", title=f"libfabric {version}", title_justify="left", box=None)
        for each in providers:
            status = f"[red]cannot be used: {each.why_not}[/]" if each.why_not else ", ".join(each.can)
            table.add_row(each.name, each.version, ", ".join(each.devices), status)
        Console().print(table)
    if all(each.why_not for each in providers):
        raise typer.Exit(FOUND)
