"""`netfold rack`: an emulated rack of hosts and a switch on this machine. Needs root."""

from typing import Annotated

import typer

app = typer.Typer(help="An emulated rack on this machine: namespaces and shaped links. Needs root.")

# As of a shell: the command line, or this machine, cannot do what was asked.
CANNOT = 2


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(help="What every host runs, behind `--`.")],
    hosts: Annotated[int, typer.Option(help="Hosts, with one worker each.")],
    rate: Annotated[str, typer.Option(help="Every link's rate each way, in tc's words: 1gbit, 200mbit.")],
    loss: Annotated[str, typer.Option(help="Packets each link loses each way: 0.1%.")] = "0%",
    switch: Annotated[bool, typer.Option(help="Run an aggregator in the switch's place.")] = True,
) -> None:
    """Run COMMAND once on every host, with RANK, WORLD_SIZE, MASTER_ADDR, NETFOLD_SWITCH, ... set.

    The exit code is the first that was not 0. Hosts, links and processes are gone afterwards, always.
    """
    from netfold.rack import Rack, RackError
    from netfold.rack.job import run_on_every_host
    from netfold.rack.processes import exit_on_signals

    try:
        with exit_on_signals(), Rack(hosts, rate, loss) as rack:
            code = run_on_every_host(rack, command, lambda line: print(line, flush=True), switch=switch)
    except (RackError, ValueError) as error:
        typer.echo(f"netfold rack run: {error}", err=True)
        raise typer.Exit(CANNOT) from None
    raise typer.Exit(code)


@app.command()
def down() -> None:
    """Remove what racks left behind whose process was killed; racks that still run are left alone."""
    from netfold.rack import RackError, remains
    from netfold.rack.command import missing

    lack = missing(loss=False)
    if lack is not None:
        typer.echo(f"netfold rack down: {lack}", err=True)
        raise typer.Exit(CANNOT)
    for rack_id in remains.racks():
        pid = remains.owner(rack_id)
        if pid is not None:
            typer.echo(f"rack {rack_id} still runs under process {pid}; `kill {pid}` ends it in order")
            continue
        try:
            remains.remove(rack_id)
        except RackError as error:
            typer.echo(f"netfold rack down: {error}", err=True)
            raise typer.Exit(CANNOT) from None
        typer.echo(f"rack {rack_id} removed")
