"""`netfold doctor`: find out what is wrong before a job or in a hanging job, and list fabrics."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from netfold.cli.output import Output, with_output
from netfold.cli.verb import FAILED, exit_on, new_app, time_option

if TYPE_CHECKING:
    from rich.console import Console

app = new_app(help="Find out what is wrong, before a job or in a job that hangs.", no_args_is_help=True)


@app.command()
@with_output("json")
def job(
    output: Output, pid: Annotated[int | None, typer.Option(help="Look only at the groups of this process.")] = None
) -> None:
    """Show what each rank on this machine is doing, and which ranks delay their groups. Exit code 1 if any does."""
    import time

    from rich.table import Table

    from netfold.diagnostics.job import diagnose
    from netfold.diagnostics.status_segment import find_ranks

    ranks = find_ranks()
    if pid is not None:
        jobs = {rank.job for rank in ranks if rank.pid == pid}
        ranks = [rank for rank in ranks if rank.job in jobs]
    verdicts = diagnose(ranks, time.monotonic_ns())
    pids = {(rank.job, rank.rank): rank.pid for rank in ranks}

    def print_verdicts(console: "Console") -> None:
        for verdict in verdicts:
            table = Table("rank", "process", "is", title=f"group of {verdict.size}", title_justify="left")
            for number, doing in verdict.lines:
                table.add_row(str(number), str(pids[verdict.job, number]), doing)
            console.print(table)
            for finding in verdict.findings:
                console.print(f"  {finding}", soft_wrap=True, highlight=False)

    output.show(
        print_verdicts if verdicts else "no group of netfold on this machine that this user may look at",
        json=lambda: [asdict(verdict) for verdict in verdicts],
    )
    if any(verdict.at_fault for verdict in verdicts):
        raise typer.Exit(FAILED)


@app.command()
@with_output("json")
def gpu(output: Output) -> None:
    """List this host's GPUs, and test with two ranks whether they reach each other's GPU memory. Exit code 1 if not."""
    from netfold.torch.device.selftest import run_selftest

    lines, passed = run_selftest()
    output.show("\n".join(lines), json=lambda: {"passed": passed, "lines": lines})
    if not passed:
        raise typer.Exit(FAILED)


@app.command()
@with_output("json")
def check(
    output: Output,
    folder: Annotated[
        Path | None, typer.Option(help="Folder that the job will write to; default: the working directory.")
    ] = None,
    timeout: float = time_option("60s", help="How long to wait for other ranks."),
) -> None:
    """Check this host before a job and name remedies. Exit code 1 if the job would fail.

    Under a launcher (torchrun, srun, mpirun): check every rank's host, the links between hosts and the switches of
    NETFOLD_SWITCH, and estimate the gain of these switches and of one more.
    """
    from netfold.bootstrap import launchers
    from netfold.communicator import Communicator, Options
    from netfold.diagnostics.preflight import advise, apply_rules, check_alone, check_ranks, failed, print_report
    from netfold.errors import NetfoldError

    # Measure the links without a switch. Afterwards a short-lived group joins each switch that has free quota.
    own: dict[str, Any] = {"options": Options(switch=""), "timeout_s": timeout, "join_timeout_s": timeout}
    with exit_on("doctor check", NetfoldError, ValueError, code=FAILED):
        if launchers.is_launched():
            with Communicator.from_environment(**own) as communicator:
                gathered, rank = check_ranks(communicator, folder, capacity=True), communicator.rank
        else:
            gathered, rank = check_alone(folder), 0
    findings = [*apply_rules(gathered), *advise(gathered)]
    if rank == 0:
        as_dicts = [{**asdict(finding), "level": finding.level.value} for finding in findings]
        output.show(
            lambda console: print_report(console, gathered, findings),
            # On one line, because a launcher may put a prefix before each line.
            json=lambda: json.dumps({**asdict(gathered), "findings": as_dicts}),
        )
    if failed(findings):
        raise typer.Exit(FAILED)


@app.command()
@with_output("json")
def fabric(output: Output) -> None:
    """List libfabric's providers on this host for NETFOLD_TRANSPORT=fabric:PROVIDER, and why some cannot be used.

    Exit code 1 if none can be used.
    """
    from rich.table import Table
    from rich.text import Text

    from netfold.diagnostics import fabric as libfabric

    version, why_not = libfabric.library()
    if why_not:
        output.show(f"no fabric: {why_not}", json=lambda: {"libfabric": None, "why_not": why_not})
        raise typer.Exit(FAILED)
    providers = libfabric.providers()
    table = Table("provider", "version", "over", "", title=f"libfabric {version}", title_justify="left", box=None)
    for each in providers:
        status = Text(f"cannot be used: {each.why_not}", "red") if each.why_not else Text(", ".join(each.can))
        table.add_row(each.name, each.version, ", ".join(each.devices), status)
    output.show(
        lambda console: console.print(table),
        json=lambda: {"libfabric": version, "providers": [asdict(each) for each in providers]},
    )
    if all(each.why_not for each in providers):
        raise typer.Exit(FAILED)
