"""The places where ranks run: this machine or an emulated rack, with a switch or without."""

import contextlib
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from netfold_lab.bench.mpi_peers import launch_mpi
from netfold_lab.rack import Rack
from netfold_lab.rack.aggregator import aggregator_argv, start_aggregator
from netfold_lab.rack.command import run
from netfold_lab.rack.names import HOST_INTERFACE
from netfold_lab.rack.processes import Process, spawn, stop
from netfold_lab.rack.remote_shell import named, remote_shell


@dataclass(frozen=True)
class Place:
    """The hosts and links on which ranks run."""

    ranks: int = 2
    rate: str = ""
    """The rate of every host's link in an emulated rack, which needs root; "": this machine, without a rack."""
    hosts: int = 0
    """Hosts of the rack, over which ranks are spread evenly; 0: one for each rank."""
    loss: str = "0%"
    """Packets that each link loses, each way."""
    delay: str = "0us"
    """Of packets on each link, each way."""
    racks: int = 1
    uplink: str | None = None
    """The rate between a rack and the core, where there are several racks."""
    switch: bool | None = False
    """Start a switch; ranks get its address in NETFOLD_SWITCH. None: without a rack, as NETFOLD_SWITCH says."""
    switch_options: tuple[str, ...] = ()
    switch_rate: str | None = None
    """The rate of the link of the switch; None: the switch has a port for each host."""


@dataclass
class Network:
    """A place while it exists: its rack, its switch, and how a process is started on a host."""

    place: Place
    rack: Rack | None = None
    switch: Process | None = None
    switch_address: str = ""
    switch_lines: deque[str] = field(default_factory=lambda: deque(maxlen=1000))
    """The last lines of the switch's log."""
    _processes: list[Process] = field(default_factory=list)

    @property
    def hosts(self) -> int:
        return self.place.hosts or self.place.ranks

    def spawn(self, host: int, argv: Sequence[str], environment: Mapping[str, str]) -> Process:
        if self.rack is not None:
            return self.rack.popen(host, argv, {"NETFOLD_INTERFACE": HOST_INTERFACE, **environment})
        switch = {} if self.place.switch is None else {"NETFOLD_SWITCH": self.switch_address}
        return self.spawn_here(argv, {**switch, **environment})

    def spawn_here(self, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> Process:
        """Start a process on this machine that ends with the network."""
        self._processes.append(spawn(argv, {**os.environ, **(environment or {})}))
        return self._processes[-1]

    def spawn_mpi(self, mpi: str, argv: list[str], folder: Path) -> Process:
        """Start this MPI's launcher, which runs `argv` as every rank, in a rack as one on every host.

        folder: gets the remote shell by which the launcher on host 0 reaches the hosts.
        Raises PeerMissingError.
        """
        if self.rack is None:
            launch = launch_mpi(mpi, self.place.ranks, argv)
            return self.spawn_here(launch.argv, launch.environment)
        shell = folder / "remote-shell"
        shell.write_text(remote_shell(self.rack.rack_id, self.hosts))
        shell.chmod(0o700)
        addresses = [self.rack.address(host) for host in range(self.hosts)]
        launch = launch_mpi(mpi, self.hosts, argv, addresses, shell)
        return self.rack.popen(0, named(0, launch.argv), launch.environment)

    def remove_shaping(self) -> None:
        """Let every link carry what the machine can."""
        assert self.rack is not None
        for end in self.rack.link_ends():
            run(["tc", "-netns", end.namespace, "qdisc", "del", "dev", end.device, "root"])


@contextlib.contextmanager
def open_network(place: Place) -> Iterator[Network]:
    """Build the rack of `place`, if it has one, and start its switch. Nothing is left after the block.

    Raises RackError.
    """
    with contextlib.ExitStack() as stack:
        network = Network(place)
        stack.callback(stop, network._processes)
        if place.rate:
            network.rack = stack.enter_context(
                Rack(
                    network.hosts,
                    place.rate,
                    place.loss,
                    delay=place.delay,
                    racks=place.racks,
                    uplink=place.uplink,
                    switch_rate=place.switch_rate,
                )
            )
            if place.switch:
                network.switch = network.rack.start_switch(network.switch_lines.append)
                network.switch_address = str(network.rack.switch_address)
        elif place.switch:
            argv = [*aggregator_argv("127.0.0.1:0"), *place.switch_options]
            started = start_aggregator(network.spawn_here, argv, network.switch_lines.append)
            network.switch, network.switch_address = started.process, started.address
        yield network
