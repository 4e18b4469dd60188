"""`netfold rack`: an emulated rack of hosts and a switch on this machine. Needs root."""

from typing import Annotated

import typer

from netfold.cli.output import Output, with_output
from netfold.cli.verb import CANNOT, FAILED, exit_on, new_app

app = new_app(help="An emulated rack on this machine: namespaces and shaped links. Needs root.")

Hosts = Annotated[int, typer.Option(help="Hosts, with one worker each.")]
Rate = Annotated[str, typer.Option(help="Rate of every link in each direction, as tc writes it: 1gbit, 200mbit.")]
Loss = Annotated[str, typer.Option(help="Packets that each link loses in each direction: 0.1%.")]
Delay = Annotated[str, typer.Option(help="Delay of each link in each direction, beyond the serialisation time: 50us.")]
Mtu = Annotated[int, typer.Option(help="MTU of every link, in bytes.")]
Racks = Annotated[int, typer.Option(help="Racks for the hosts, each with a switch.")]
Uplink = Annotated[str | None, typer.Option(help="The rate of each rack's link to the core.")]
SwitchRate = Annotated[
    str | None, typer.Option(help="Make the aggregator a host at the core, behind a link of this rate.")
]


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(help="The command for every host, after `--`.")],
    hosts: Hosts,
    rate: Rate,
    loss: Loss = "0%",
    delay: Delay = "0us",
    mtu: Mtu = 1500,
    racks: Racks = 1,
    uplink: Uplink = None,
    switch_rate: SwitchRate = None,
    switch: Annotated[bool, typer.Option(help="Run an aggregator.")] = True,
    leaves: Annotated[
        bool, typer.Option("--leaves", help="Also run an aggregator in each rack, as a child of the one at the core.")
    ] = False,
) -> None:
    """Run COMMAND once on every host, with RANK, WORLD_SIZE, MASTER_ADDR, NETFOLD_SWITCH, ... set.

    The exit code is the first that was not 0. All hosts, links and processes are removed at the end, also after errors.
    """
    from netfold_lab.rack import Rack, RackError
    from netfold_lab.rack.job import run_on_every_host
    from netfold_lab.rack.processes import exit_on_signals

    with (
        exit_on("rack run", RackError, ValueError),
        exit_on_signals(),
        Rack(hosts, rate, loss, delay=delay, mtu=mtu, racks=racks, uplink=uplink, switch_rate=switch_rate) as rack,
    ):
        code = run_on_every_host(rack, command, lambda line: print(line, flush=True), switch=switch, leaves=leaves)
    raise typer.Exit(code)


@app.command()
@with_output("json", "csv")
def check(
    output: Output,
    hosts: Hosts = 2,
    rate: Rate = "1gbit",
    loss: Loss = "0%",
    delay: Delay = "0us",
    mtu: Mtu = 1500,
    racks: Racks = 1,
    uplink: Uplink = None,
    switch_rate: SwitchRate = None,
) -> None:
    """Build a rack and measure rate, delay, loss and MTU of each kind of path, against what was asked for.

    The exit code is 1 if a value differs from what was asked for. Takes about 6 s per path.
    """
    from rich.table import Table

    from netfold_lab.rack import Rack, RackError
    from netfold_lab.rack.check import check as measure
    from netfold_lab.rack.processes import exit_on_signals

    with (
        exit_on("rack check", RackError, ValueError),
        exit_on_signals(),
        Rack(hosts, rate, loss, delay=delay, mtu=mtu, racks=racks, uplink=uplink, switch_rate=switch_rate) as rack,
    ):
        findings = list(measure(rack))
    table = Table("path", "", "asked", "measured", "")
    route = ""
    for finding in findings:
        if finding.route != route:
            table.add_section()
        verdict = "as asked" if finding.passed else "NOT as asked"
        table.add_row("" if finding.route == route else finding.route, *finding[1:4], verdict)
        route = finding.route
    rows = [finding._asdict() for finding in findings]
    output.show(lambda console: console.print(table), json=lambda: rows, csv=lambda: rows)
    raise typer.Exit(0 if all(finding.passed for finding in findings) else FAILED)


@app.command()
def down() -> None:
    """Remove namespaces and processes of racks whose own clean-up was killed. Leaves running racks alone."""
    from netfold_lab.rack import RackError, cleanup
    from netfold_lab.rack.command import why_unavailable

    lack = why_unavailable(loss=False)
    if lack is not None:
        typer.echo(f"netfold rack down: {lack}", err=True)
        raise typer.Exit(CANNOT)
    for rack_id in cleanup.racks():
        pid = cleanup.owner(rack_id)
        if pid is not None:
            typer.echo(f"rack {rack_id} still runs under process {pid}; `kill {pid}` ends it in order")
            continue
        with exit_on("rack down", RackError):
            cleanup.remove(rack_id)
        typer.echo(f"rack {rack_id} removed")
