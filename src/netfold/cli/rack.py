"""`netfold rack`: an emulated rack of hosts and a switch on this machine. Needs root."""

from typing import Annotated

import typer

app = typer.Typer(help="An emulated rack on this machine: namespaces and shaped links. Needs root.")

# As of a shell: the command line, or this machine, cannot do what was asked.
CANNOT = 2


Hosts = Annotated[int, typer.Option(help="Hosts, with one worker each.")]
Rate = Annotated[str, typer.Option(help="Every link's rate each way, in tc's words: 1gbit, 200mbit.")]
Loss = Annotated[str, typer.Option(help="Packets each link loses each way: 0.1%.")]
Delay = Annotated[str, typer.Option(help="What each link takes beside its rate, each way: 50us.")]
Mtu = Annotated[int, typer.Option(help="Of every link, in bytes.")]
Racks = Annotated[int, typer.Option(help="Racks that the hosts stand in, each with a switch.")]
Uplink = Annotated[str | None, typer.Option(help="The rate of each rack's link to the core.")]
SwitchRate = Annotated[
    str | None, typer.Option(help="Make the aggregator a host at the core, behind a link of this rate.")
]


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(help="What every host runs, behind `--`.")],
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
        bool, typer.Option("--leaves", help="One in each rack's switch too, below the one at the core.")
    ] = False,
) -> None:
    """Run COMMAND once on every host, with RANK, WORLD_SIZE, MASTER_ADDR, NETFOLD_SWITCH, ... set.

    The exit code is the first that was not 0. Hosts, links and processes are gone afterwards, always.
    """
    from netfold.rack import Rack, RackError
    from netfold.rack.job import run_on_every_host
    from netfold.rack.processes import exit_on_signals

    try:
        asked = Rack(hosts, rate, loss, delay=delay, mtu=mtu, racks=racks, uplink=uplink, switch_rate=switch_rate)
        with exit_on_signals(), asked as rack:
            code = run_on_every_host(rack, command, lambda line: print(line, flush=True), switch=switch, leaves=leaves)
    except (RackError, ValueError) as error:
        typer.echo(f"netfold rack run: {error}", err=True)
        raise typer.Exit(CANNOT) from None
    raise typer.Exit(code)


@app.command()
def check(
    hosts: Hosts = 2,
    rate: Rate = "1gbit",
    loss: Loss = "0%",
    delay: Delay = "0us",
    mtu: Mtu = 1500,
    racks: Racks = 1,
    uplink: Uplink = None,
    switch_rate: SwitchRate = None,
) -> None:
    """Build a rack and measure it: rate, delay, loss and MTU of each kind of way, against what was asked for.

    The exit code is 1 where something is not as asked. Takes some 6 s a way.
    """
    from rich.console import Console
    from rich.table import Table

    from netfold.rack import Rack, RackError
    from netfold.rack.check import check as findings
    from netfold.rack.processes import exit_on_signals

    table = Table("way", "", "asked", "measured", "")
    good, way = True, ""
    try:
        asked = Rack(hosts, rate, loss, delay=delay, mtu=mtu, racks=racks, uplink=uplink, switch_rate=switch_rate)
        with exit_on_signals(), asked as rack:
            for finding in findings(rack):
                good &= finding.passed
                verdict = "as asked" if finding.passed else "NOT as asked"
                if finding.route != way:
                    table.add_section()
                table.add_row("" if finding.route == way else finding.route, *finding[1:4], verdict)
                way = finding.route
    except (RackError, ValueError) as error:
        typer.echo(f"netfold rack check: {error}", err=True)
        raise typer.Exit(CANNOT) from None
    Console().print(table)
    raise typer.Exit(0 if good else 1)


@app.command()
def down() -> None:
    """Remove what racks left behind that were killed with all that looks after them; those that run are left alone."""
    from netfold.rack import RackError, cleanup
    from netfold.rack.command import why_unavailable

    lack = why_unavailable(loss=False)
    if lack is not None:
        typer.echo(f"netfold rack down: {lack}", err=True)
        raise typer.Exit(CANNOT)
    for rack_id in cleanup.racks():
        pid = cleanup.owner(rack_id)
        if pid is not None:
            typer.echo(f"rack {rack_id} still runs under process {pid}; `kill {pid}` ends it in order")
            continue
        try:
            cleanup.remove(rack_id)
        except RackError as error:
            typer.echo(f"netfold rack down: {error}", err=True)
            raise typer.Exit(CANNOT) from None
        typer.echo(f"rack {rack_id} removed")
