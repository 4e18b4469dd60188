"""An all_reduce at a time, in a rack: which way, among how many hosts and of what, the caller says turn by turn.

The bench's other runner (`runner.py`) plays whole trials; this one is for measurements that change something
between two calls: a link's loss, who takes part, the length of a packet.
"""

import contextlib
import selectors
import socket
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from netfold.bench.connection import Connection, Message
from netfold.bench.launch import start_mpi
from netfold.bench.runner import BenchError
from netfold.bench.start_line import StartLine
from netfold.rack import Rack
from netfold.rack.command import run
from netfold.rack.link import Link, loss_rules
from netfold.rack.names import HOST_INTERFACE, SUBNET, SUBNET_BITS, host_namespace, port_name, switch_namespace
from netfold.rack.processes import DRAIN_S, FAILURE_GRACE_S, Process, follow

_TORCH = "torch"
_POLL_S = 0.2
_KEPT_LINES = 60


@dataclass(frozen=True)
class Configuration:
    """One way to add up, among the first `workers` hosts.

    options: fields of netfold.Options, None: gloo, or the MPI. payload_bytes: of values in a packet to the switch,
    where it is not to be found by trying; a multiple of 8, 512 to 8880. mpi: the one that was gathered; "": none.
    """

    label: str
    workers: int
    options: Mapping[str, str] | None = None
    payload_bytes: int | None = None
    mpi: str = ""

    @property
    def world(self) -> str:
        """In which processes."""
        return self.mpi or _TORCH


@dataclass(frozen=True)
class Timing:
    """Of some calls: seconds of each, the slowest rank's; wrong elements, over all ranks and calls; packets sent again
    by all; bytes that a rank sent in the last call, as netfold's records have it (None: gloo, MPI); the greatest rank's
    root mean square of errors over that of the exact sum (None: whole numbers, which are right or wrong)."""

    took_s: list[float]
    wrong: int
    again: int
    sent_bytes: int | None
    error: float | None

    @property
    def median_s(self) -> float:
        return statistics.median(self.took_s)


class RackRunner:
    """The ranks, one on every host of a rack that stands, and one more of the MPI, if there is one. `versions`,
    `congestion_control`: what they said of themselves."""

    def __init__(self, rack: Rack, deadline_s: float, mpi: str) -> None:
        self.rack = rack
        self.versions: dict[str, str] = {}
        self.congestion_control = ""
        self._deadline_s = deadline_s
        self._deadline = time.monotonic() + deadline_s
        self._mpi = mpi
        # By world. The launcher alone stands for all ranks of an MPI, which end with it.
        self._started: dict[str, list[_Started]] = {}
        self._connections: dict[str, dict[int, Connection]] = {}

    def meet(self, folder: Path) -> None:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(folder / "control"))
            server.listen(2 * self.rack.hosts)
            server.settimeout(_POLL_S)
            self._start(folder)
            new: list[Connection] = []
            while any(len(ranks) < self.rack.hosts for ranks in self._connections.values()):
                for world in self._started:
                    self._watch(world)
                with contextlib.suppress(TimeoutError):
                    new.append(Connection(server.accept()[0]))
                for connection in list(new):
                    if (hello := connection.poll()) is not None:
                        self._raise_error(hello)
                        new.remove(connection)
                        self._connections[hello["world"]][hello["rank"]] = connection
                        self.versions |= hello["versions"]
                        self.congestion_control = hello["congestion_control"]

    def _start(self, folder: Path) -> None:
        def argv(world: str) -> list[str]:
            return [
                sys.executable,
                "-m",
                "netfold.bench.rack_runner_rank",
                world,
                str(folder),
                str(int(self._deadline_s)),
            ]

        environment = {"NETFOLD_INTERFACE": HOST_INTERFACE}
        self._started[_TORCH] = [
            _Started(f"{_TORCH} rank {host}", self.rack.popen(host, argv(_TORCH), environment))
            for host in range(self.rack.hosts)
        ]
        if self._mpi:
            self._started[self._mpi] = [_Started(self._mpi, start_mpi(self.rack, self._mpi, folder, argv(self._mpi)))]
        for world in self._started:
            self._connections[world] = {}
            # Ranks look for theirs when they open a way.
            for workers in range(1, self.rack.hosts + 1):
                StartLine.draw(folder / f"{world}-{workers}.line", workers)

    def open(self, ways: Sequence[Configuration]) -> None:
        """Make a group for each; every host must know of it, also one that is not in it."""
        for way in ways:
            fields = {name: value for name, value in asdict(way).items() if name != "mpi"}
            self._tell(way.world, self.rack.hosts, {"do": "open", **fields})

    def turn(
        self, way: Configuration, size_bytes: int, number: int, *, calls: int = 1, values: str = "whole"
    ) -> Timing:
        """`calls` calls one after the other, of `size_bytes` of f32 each.

        values: `whole` numbers whose sum f32 holds exactly, others for each `number` (0 to 1000) and checked one by
        one; or `normal`, whose sum's error is measured, and those off by a quarter of the greatest sum are wrong.
        """
        command = {"do": "turn", "label": way.label, "size_bytes": size_bytes, "number": number}
        answers = self._tell(way.world, way.workers, {**command, "calls": calls, "values": values})
        errors = [answer["error"] for answer in answers if answer["error"] is not None]
        return Timing(
            took_s=[max(took) for took in zip(*(answer["took_s"] for answer in answers), strict=True)],
            wrong=sum(answer["wrong"] for answer in answers),
            again=sum(answer["again"] for answer in answers),
            sent_bytes=answers[0]["sent_bytes"],
            error=max(errors) if errors else None,
        )

    def end(self) -> None:
        for connection in self._all_connections():
            connection.send({"do": "end"})
        until = time.monotonic() + FAILURE_GRACE_S
        processes = [one.process for started in self._started.values() for one in started]
        while time.monotonic() < until and any(process.poll() is None for process in processes):
            time.sleep(0.02)

    def close(self) -> None:
        for connection in self._all_connections():
            connection.close()

    def _all_connections(self) -> list[Connection]:
        return [connection for ranks in self._connections.values() for connection in ranks.values()]

    def _tell(self, world: str, workers: int, command: Message) -> list[Message]:
        """One command to a world's first ranks; their answers in the order of ranks."""
        connections = [self._connections[world][rank] for rank in range(workers)]
        for connection in connections:
            connection.send(command)
        answers: dict[Connection, Message] = {}
        with selectors.DefaultSelector() as selector:
            for connection in connections:
                selector.register(connection.socket, selectors.EVENT_READ, connection)
            while len(answers) < len(connections):
                for key, _ in selector.select(_POLL_S):
                    connection = key.data
                    if (answer := connection.poll()) is not None:
                        self._raise_error(answer)
                        answers[connection] = answer
                        selector.unregister(connection.socket)
                if len(answers) < len(connections):
                    self._watch(world)
        return [answers[connection] for connection in connections]

    def _watch(self, world: str) -> None:
        for started in self._started[world]:
            code = started.process.poll()
            if code is not None:
                # A rank may have said why a moment before.
                time.sleep(_POLL_S)
                for connection in self._connections[world].values():
                    self._raise_error(connection.poll() or {})
                self._fail(f"{started.name} ended with exit code {code}", started)
        if time.monotonic() > self._deadline:
            self._fail(f"the ranks had not ended after {self._deadline_s:.0f} s", *self._started[world])

    def _raise_error(self, answer: Message) -> None:
        if "error_text" in answer:
            raise BenchError(f"{answer['who']} failed: {answer['error_text'].rstrip()}")

    def _fail(self, what: str, *whose: "_Started") -> None:
        for started in whose:
            if started.process.poll() is not None:
                started.reader.join(DRAIN_S)
        said = [f"{started.name}| {line}" for started in whose for line in started.lines]
        raise BenchError("\n".join([what, *said]))


@contextlib.contextmanager
def start_rack_runner(rack: Rack, deadline_s: float, mpi: str = "") -> Iterator[RackRunner]:
    """A rank on every host of `rack`, which stands; its aggregators are the caller's, and started before.

    mpi: one of bench.peers', whose ranks stand beside the others; "": none. The ranks end with the block, or with the
    rack. Raises BenchError where one fails, or at the deadline; PeerMissingError where the MPI is not here.
    """
    with tempfile.TemporaryDirectory(prefix="netfold-turns-") as name:
        turns = RackRunner(rack, deadline_s, mpi)
        try:
            turns.meet(Path(name))
            yield turns
            turns.end()
        finally:
            turns.close()


def set_loss(rack: Rack, loss_ratio: float) -> None:
    """Let every host's link lose so much from now on, both ways. The rack must have been lossy from the start: such a
    link cuts packets first, so that a loss takes one."""
    link = Link(rack.link.rate_bits, loss_ratio)
    for host in range(rack.hosts):
        for namespace, interface in (
            (switch_namespace(rack.rack_id), port_name(host)),
            (host_namespace(rack.rack_id, host), HOST_INTERFACE),
        ):
            rules = f"delete table netdev loss_{interface}\n{loss_rules(interface, link)}"
            run(["ip", "netns", "exec", namespace, "nft", "-f", "-"], rules)


def set_congestion_control(rack: Rack, name: str) -> None:
    """What TCP connections between hosts that are made from now on use.

    By the route: a namespace's own default can only be one that the machine allows to everybody.
    """
    for host in range(rack.hosts):
        replace = ["ip", "-netns", host_namespace(rack.rack_id, host), "route", "replace"]
        direct = [f"{SUBNET}.0/{SUBNET_BITS}", "dev", HOST_INTERFACE, "scope", "link", "src", rack.address(host)]
        run([*replace, *direct, "proto", "kernel", "congctl", name])


@dataclass(eq=False)
class _Started:
    name: str
    process: Process
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))
    reader: Any = None

    def __post_init__(self) -> None:
        self.reader = follow(self.process, self.lines.append)
