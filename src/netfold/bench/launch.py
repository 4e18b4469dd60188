"""Starts the ranks of every world, on this machine, in a rack or under an MPI, and ends them."""

import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from netfold.bench.backends import MPIS
from netfold.bench.config import BenchEnvironment
from netfold.bench.mpi_peers import launch_mpi
from netfold.bench.ranks import KEPT_LINES, Lines, Ranks
from netfold.bench.start_line import StartLine, line_path
from netfold.extras import need
from netfold.rack import Rack
from netfold.rack.aggregator import aggregator_argv, start_aggregator
from netfold.rack.names import HOST_INTERFACE
from netfold.rack.processes import Process, spawn, stop, uninterrupted
from netfold.rack.remote_shell import named, remote_shell


@contextlib.contextmanager
def start_ranks(place: BenchEnvironment, worlds: Sequence[str], rack: Rack | None = None) -> Iterator[Ranks]:
    """Start the ranks of all worlds and wait until they have connected. No rank is left when the block is done.

    rack: one that stands, with its aggregators; None: `place` says which one to build, if any.
    Raises BenchError; ValueError (PeerMissingError, MissingExtraError) where a world cannot be had; RackError where the
    rack or the switch cannot be started.
    """
    worlds = list(dict.fromkeys(worlds))
    if "torch" in worlds:
        need("a backend of torch", ["torch"], "torch")
    switch_lines = Lines(maxlen=KEPT_LINES)
    processes: dict[str, Process] = {}
    aggregators: list[Process] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="netfold-bench-")))
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(str(folder / "control"))
        server.listen(len(worlds) * place.workers)
        commands = {}
        for world in worlds:
            commands[world] = [sys.executable, "-m", "netfold.bench.rank", world, str(folder), str(place.deadline_s)]
            for ranks in range(1, place.workers + 1):
                StartLine.draw(line_path(folder, world, ranks), ranks)
        if rack is None and place.rack_rate is not None:
            rack = stack.enter_context(Rack(place.workers, place.rack_rate, place.rack_loss, delay=place.rack_delay))
            if place.switch is not False:
                rack.start_switch(switch_lines.append)
        stack.callback(lambda: _stop([*processes.values(), *aggregators]))
        if rack is not None:
            _start_in_rack(rack, commands, folder, processes)
        else:
            _start_here(place, commands, processes, aggregators, switch_lines.append)
        started = Ranks(processes, place.workers, place.deadline_s, switch_lines)
        try:
            started.accept(server, worlds)
            yield started
            started.end()
        finally:
            with uninterrupted():
                started.close()


def start_mpi(rack: Rack, mpi: str, folder: Path, argv: list[str]) -> Process:
    """Start this MPI's launcher on host 0: it runs `argv` as a rank on every host. Raises PeerMissingError.

    folder: gets the remote shell by which the launcher reaches the hosts.
    """
    shell = folder / "remote-shell"
    shell.write_text(remote_shell(rack.rack_id, rack.hosts))
    shell.chmod(0o700)
    launch = launch_mpi(mpi, rack.hosts, argv, [rack.address(host) for host in range(rack.hosts)], shell)
    return rack.popen(0, named(0, launch.argv), launch.environment)


def _start_in_rack(rack: Rack, commands: Mapping[str, list[str]], folder: Path, ranks: dict[str, Process]) -> None:
    for world, argv in commands.items():
        if world in MPIS:
            ranks[world] = start_mpi(rack, world, folder, argv)
            continue
        for host in range(rack.hosts):
            # A Communicator's ranks connect through a folder, which does not tell them the network between them.
            ranks[f"{world} rank {host}"] = rack.popen(host, argv, {"NETFOLD_INTERFACE": HOST_INTERFACE})


def _start_here(
    place: BenchEnvironment,
    commands: Mapping[str, list[str]],
    ranks: dict[str, Process],
    aggregators: list[Process],
    on_switch_line: Callable[[str], None],
) -> None:
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

    def start(argv: Sequence[str]) -> Process:
        aggregators.append(spawn(argv, environment))
        return aggregators[-1]

    if place.switch:
        environment["NETFOLD_SWITCH"] = start_aggregator(start, aggregator_argv("127.0.0.1:0"), on_switch_line).address
    for world, argv in commands.items():
        if world in MPIS:
            launch = launch_mpi(world, place.workers, argv)
            ranks[world] = spawn(launch.argv, {**os.environ, **launch.environment})
            continue
        for rank in range(place.workers):
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks[f"{world} rank {rank}"] = spawn(argv, environment)


def _stop(processes: Iterable[Process]) -> None:
    with uninterrupted():
        stop(list(processes))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
