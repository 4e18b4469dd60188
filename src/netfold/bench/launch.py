"""Start the processes of every world, on this machine or in a rack, and end them in order."""

import contextlib
import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from netfold.bench.backends.backend import MPIS
from netfold.bench.config import BenchEnvironment
from netfold.bench.mpi_peers import launch_mpi, launch_mpi_in_rack
from netfold.extras import need
from netfold.rack import Rack
from netfold.rack.aggregator import aggregator_argv, start_aggregator
from netfold.rack.names import HOST_INTERFACE
from netfold.rack.processes import Process, spawn, stop, uninterrupted
from netfold.rack.remote_shell import named, remote_shell

# Of each process: enough for a traceback and what led to it.
KEPT_LINES = 60

Lines = deque[str]


@dataclass
class Running:
    """processes: those that must live until the end, by the name that their output gets."""

    processes: dict[str, Process] = field(default_factory=dict)
    switch_lines: Lines = field(default_factory=lambda: deque(maxlen=KEPT_LINES))


@contextlib.contextmanager
def start_worlds(place: BenchEnvironment, worlds: Sequence[str], control: Path, folder: Path) -> Iterator[Running]:
    """The ranks of all worlds, as processes that connect to `control`. None is left when the block is done.

    Raises ValueError (PeerMissingError, MissingExtraError) where a world cannot be had, RackError where the rack or the
    switch cannot.
    """
    if "torch" in worlds:
        need("a backend of torch", ["torch"], "torch")
    commands = {
        world: [sys.executable, "-m", "netfold.bench.rank", world, str(control), str(folder), str(place.deadline_s)]
        for world in worlds
    }
    start = _in_rack if place.rack_rate is not None else _on_this_machine
    with start(place, commands, folder) as running:
        yield running


def start_mpi(rack: Rack, mpi: str, folder: Path, argv: list[str]) -> Process:
    """This MPI's launcher, on host 0: it runs `argv` as a rank on every host. folder: for what it starts them by.

    Raises PeerMissingError.
    """
    shell = folder / "remote-shell"
    shell.write_text(remote_shell(rack.rack_id, rack.hosts))
    shell.chmod(0o700)
    launch = launch_mpi_in_rack(mpi, [rack.address(host) for host in range(rack.hosts)], shell, argv)
    return rack.popen(0, named(0, launch.argv), launch.environment)


@contextlib.contextmanager
def _in_rack(place: BenchEnvironment, commands: dict[str, list[str]], folder: Path) -> Iterator[Running]:
    assert place.rack_rate is not None
    running = Running()
    with Rack(place.workers, place.rack_rate, place.rack_loss, delay=place.rack_delay) as rack:
        if place.switch is not False:
            rack.start_switch(running.switch_lines.append)
        for world, argv in commands.items():
            if world in MPIS:
                running.processes[world] = start_mpi(rack, world, folder, argv)
                continue
            for host in range(place.workers):
                # A Communicator's ranks meet in a folder, which says nothing of the network between them.
                process = rack.popen(host, argv, {"NETFOLD_INTERFACE": HOST_INTERFACE})
                running.processes[f"{world} rank {host}"] = process
        yield running


@contextlib.contextmanager
def _on_this_machine(place: BenchEnvironment, commands: dict[str, list[str]], folder: Path) -> Iterator[Running]:
    running = Running()
    processes: list[Process] = []
    environment = {
        **os.environ,
        "WORLD_SIZE": str(place.workers),
        "LOCAL_WORLD_SIZE": str(place.workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    if place.switch is False:
        environment.pop("NETFOLD_SWITCH", None)

    def start(command: Sequence[str]) -> Process:
        processes.append(spawn(command, environment))
        return processes[-1]

    try:
        if place.switch:
            listen: Callable[[str], None] = running.switch_lines.append
            environment["NETFOLD_SWITCH"] = start_aggregator(start, aggregator_argv("127.0.0.1:0"), listen).address
        for world, argv in commands.items():
            if world in MPIS:
                launch = launch_mpi(world, place.workers, argv)
                processes.append(spawn(launch.argv, {**os.environ, **launch.environment}))
                running.processes[world] = processes[-1]
                continue
            for rank in range(place.workers):
                environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                running.processes[f"{world} rank {rank}"] = start(argv)
        yield running
    finally:
        with uninterrupted():
            stop(processes)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
