"""Start the ranks of a benchmark, give them orders in turns, and write what was measured.

A script has a function that ranks run and a function that measures. The measuring function opens a `Network` at a
`Place`, starts ranks there, and sends orders with `Ranks.ask`. It returns the body of a page. The last line of a script
is `driver.run(measure)`: the options of the command are the parameters of `measure`, the page is
bench/results/MEASURE.md, and its title is the first line of the docstring of `measure`. The page names the command, the
machine, the commit, the load, and how many times ranks were started.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import typer

from netfold import Communicator, FileStore, Options
from netfold.bench.machine import spoken
from netfold.bench.spread import interleave, spread
from netfold.bench.start_line import StartLine
from netfold.bench.table import markdown
from netfold.rack import Rack
from netfold.rack.aggregator import aggregator_argv, start_aggregator
from netfold.rack.command import run as run_command
from netfold.rack.names import HOST_INTERFACE, host_namespace, port_name, switch_namespace
from netfold.rack.processes import Process, exit_on_signals, follow, spawn, stop

RESULTS = Path(__file__).parent / "results"
# For one start of ranks: an absent rank must not leave the benchmark waiting.
DEADLINE_S = 900.0
# For ranks to close their groups after the last order.
CLOSING_S = 10.0
_POLL_S = 0.2

Side = TypeVar("Side")
Answer = TypeVar("Answer")
_launches = 0


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
    racks: int = 1
    uplink: str | None = None
    """The rate between a rack and the core, where there are several racks."""
    switch: bool = False
    """Start a switch; ranks get its address in NETFOLD_SWITCH."""
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
        switch = {"NETFOLD_SWITCH": self.switch_address} if self.switch_address else {}
        return self.spawn_here(argv, {**switch, **environment})

    def spawn_here(self, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> Process:
        """Start a process on this machine that ends with the network."""
        self._processes.append(spawn(argv, {**os.environ, **(environment or {})}))
        return self._processes[-1]

    def link_ends(self) -> Iterator[tuple[int, str, str]]:
        """Yield both ends of every host's link: the host, the namespace, the interface; the switch's end comes first.

        The rack must have one switch.
        """
        assert self.rack is not None
        for host in range(self.hosts):
            yield host, switch_namespace(self.rack.rack_id), port_name(host)
            yield host, host_namespace(self.rack.rack_id, host), HOST_INTERFACE

    def remove_shaping(self) -> None:
        """Let every link carry what the machine can."""
        for _, namespace, interface in self.link_ends():
            run_command(["tc", "-netns", namespace, "qdisc", "del", "dev", interface, "root"])


@contextlib.contextmanager
def open_network(place: Place) -> Iterator[Network]:
    """Build the rack of `place`, if it has one, and start its switch. Nothing is left after the block."""
    with contextlib.ExitStack() as stack:
        network = Network(place)
        stack.callback(stop, network._processes)
        if place.rate:
            network.rack = stack.enter_context(
                Rack(
                    network.hosts,
                    place.rate,
                    place.loss,
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


class Ranks:
    """The ranks of one job, in the benchmark's process.

    folder: which all ranks share; it is removed with them.
    """

    def __init__(self, folder: Path, processes: Sequence[Process], deadline_s: float) -> None:
        self.folder = folder
        self.processes = processes
        self._connections: list[Connection] = []
        self._deadline = time.monotonic() + deadline_s

    def ask(self, *order: Any) -> list[Any]:
        """Send `order` to every rank, and return the answers by rank.

        Raises RuntimeError where a rank ends, and TimeoutError after the deadline.
        """
        self.send(*order)
        return self.answers()

    def send(self, *order: Any) -> None:
        for connection in self._connections:
            connection.send(order)

    def answers(self) -> list[Any]:
        found: dict[Connection, Any] = {}
        while missing := [each for each in self._connections if each not in found]:
            self._check_deadline()
            for connection in wait(missing, _POLL_S):
                assert isinstance(connection, Connection)
                try:
                    found[connection] = connection.recv()
                except (EOFError, ConnectionResetError):
                    rank = self._connections.index(connection)
                    raise RuntimeError(f"rank {rank} ended before it answered; see its output above") from None
        return [found[connection] for connection in self._connections]

    def _connect(self, server: socket.socket, arguments: Sequence[Any]) -> None:
        by_rank: dict[int, Connection] = {}
        while len(by_rank) < len(self.processes):
            self._check_deadline()
            for rank, process in enumerate(self.processes):
                if rank not in by_rank and process.poll() is not None:
                    raise RuntimeError(f"rank {rank} ended with {process.returncode} before it was ready; see above")
            with contextlib.suppress(TimeoutError):
                connection = Connection(server.accept()[0].detach())
                by_rank[connection.recv()] = connection
        self._connections = [by_rank[rank] for rank in sorted(by_rank)]
        self.ask(*arguments)

    def _close(self) -> None:
        for connection in self._connections:
            connection.close()
        until = time.monotonic() + CLOSING_S
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))

    def _check_deadline(self) -> None:
        if time.monotonic() > self._deadline:
            raise TimeoutError("the ranks did not answer before the deadline; see their output above")


@contextlib.contextmanager
def start_ranks(
    network: Network,
    function: Callable[..., None],
    *arguments: Any,
    hosts: Sequence[int] | None = None,
    environment: Mapping[str, str] | None = None,
    python: str = sys.executable,
    deadline_s: float = DEADLINE_S,
) -> Iterator[Ranks]:
    """Start ranks that run `function(rank, *arguments)` of the running script, and wait until all serve orders.

    hosts: the host of each rank; None: as the place of `network` says.
    arguments, orders, answers: anything that pickle takes.
    """
    global _launches
    _launches += 1
    if hosts is None:
        size = network.place.ranks
        hosts = [rank * network.hosts // size for rank in range(size)]
    with (
        tempfile.TemporaryDirectory(prefix="netfold-bench-") as name,
        socket.socket(socket.AF_UNIX) as server,
    ):
        server.bind(f"{name}/orders")
        server.listen(len(hosts))
        server.settimeout(_POLL_S)
        StartLine.draw(Path(name, "line"), len(hosts))
        argv = [python, "-W", "ignore", os.path.abspath(sys.argv[0]), "rank", function.__name__, name]
        processes = []
        try:
            for rank, host in enumerate(hosts):
                own = {"RANK": str(rank), "WORLD_SIZE": str(len(hosts)), **(environment or {})}
                processes.append(network.spawn(host, argv, own))
                follow(processes[-1], lambda line, rank=rank: print(f"rank {rank}| {line}", file=sys.stderr))  # type: ignore[misc]
            ranks = Ranks(Path(name), processes, deadline_s)
            ranks._connect(server, arguments)
            yield ranks
            ranks._close()
        finally:
            stop(processes)


@contextlib.contextmanager
def ranks_at(place: Place, function: Callable[..., None], *arguments: Any, **options: Any) -> Iterator[Ranks]:
    """`open_network` and `start_ranks` in one."""
    with open_network(place) as network, start_ranks(network, function, *arguments, **options) as ranks:
        yield ranks


class Rank:
    """A rank of a job, in its own process."""

    def __init__(self, folder: str) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.folder = Path(folder)
        self.line = StartLine(self.folder / "line", self.rank, self.size)
        self._orders = Client(f"{folder}/orders")
        self._orders.send(self.rank)
        self.arguments: tuple[Any, ...] = self._orders.recv()
        self._torch_groups = itertools.count()

    def serve(self, answer: Callable[..., Any]) -> None:
        """Send the benchmark `answer(*order)` for every order, until the benchmark ends the job."""
        self._orders.send(None)
        while True:
            try:
                order = self._orders.recv()
            except (EOFError, ConnectionResetError):
                return
            self._orders.send(answer(*order))

    def time(self, call: Callable[[], Any], calls: int = 1) -> list[float]:
        """Cross the start line with all ranks, and return the seconds of each of `calls` calls."""
        self.line.cross()
        seconds = []
        for _ in range(calls):
            began = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - began)
        return seconds

    def communicator(self, name: str, timeout_s: float = 300.0, **options: Any) -> Communicator:
        """A new group of all ranks. options: of netfold.Options."""
        store = FileStore(self.folder / f"group-{name}")
        return Communicator(store, self.rank, self.size, options=Options(**options), timeout_s=timeout_s)

    @contextlib.contextmanager
    def torch_group(self, backend: str = "netfold", **options: Any) -> Iterator[None]:
        """A new default group of torch inside the block, with one thread per rank."""
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        store = dist.FileStore(f"{self.folder}/torch-{next(self._torch_groups)}", self.size)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, **options)
        yield
        self.line.cross()
        dist.destroy_process_group()


class CheckedSum:
    """all_reduces of `size_bytes` of f32, every element checked.

    Values are whole numbers up to `period` + 3, whose sum must be exact in the wire format; they differ in every call.
    """

    def __init__(self, rank: Rank, size_bytes: int, period: int = 4093) -> None:
        self._rank = rank
        self._pattern = (np.arange(size_bytes // 4) % period).astype(np.float32)
        self._tensor = np.empty_like(self._pattern)
        self._calls = itertools.count()

    def __call__(self, all_reduce: Callable[[Any], object]) -> tuple[float, int]:
        """Seconds of this rank, and wrong elements."""
        call, size = next(self._calls), self._rank.size
        np.add(self._pattern, (self._rank.rank + call) % 4, out=self._tensor)
        (seconds,) = self._rank.time(lambda: all_reduce(self._tensor))
        due = self._pattern * size + sum((rank + call) % 4 for rank in range(size))
        return seconds, int(np.count_nonzero(self._tensor != due))


def take_turns(
    sides: Sequence[Side],
    rounds: int,
    measure: Callable[[Side], Answer],
    *,
    warmups: int = 1,
    at_most: int = 0,
    budget_s: float = 0.0,
) -> dict[Side, list[Answer]]:
    """Measure every side once in each round, another side first each time.

    warmups: the first rounds, which do not count.
    at_most: further rounds follow up to this number, until `budget_s` seconds have passed since the start.
    """
    found: dict[Side, list[Answer]] = {side: [] for side in sides}
    until = time.monotonic() + budget_s
    for turn, side in interleave(sides, max(rounds, at_most), warmups):
        begins = all(len(answers) == turn for answers in found.values())
        if turn >= rounds and begins and time.monotonic() > until:
            break
        answer = measure(side)
        if turn >= 0:
            found[side].append(answer)
    return found


def slowest(answers: Iterable[Sequence[float]]) -> list[float]:
    """The largest of the ranks' numbers, call by call."""
    return [max(numbers) for numbers in zip(*answers, strict=True)]


def cpu_seconds(pid: int | None) -> float:
    """CPU seconds of all threads of a process so far; 0.0 for no process."""
    threads = [] if pid is None else Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def cell(values: Iterable[float], form: str = ".2f", scale: float = 1.0, apart: str = " (") -> str:
    """The median of `values` with its 5% .. 95%. apart: " | " gives two cells."""
    of = spread([value * scale for value in values])
    return f"{of.median:{form}}{apart}{of.p5:{form}} .. {of.p95:{form}}{')' if '(' in apart else ''}"


def table(head: str, rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table. head: the columns, apart by " | "; a row's cells are written with str()."""
    return "\n".join(markdown(head.split(" | "), [[str(each) for each in row] for row in rows]))


def keep(path: Path, found: Mapping[str, Any], indent: int | None = 1) -> dict[str, Any]:
    """Put raw values into the JSON file `path`, beside what it holds of other names. Returns all of it, by name."""
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    kept = dict(sorted({**kept, **found}.items()))
    path.write_text(json.dumps(kept, indent=indent) + "\n")
    return kept


def be_rank() -> bool:
    """Be the rank that `start_ranks` wants of this process. Returns whether it wants one."""
    if sys.argv[1:2] != ["rank"]:
        return False
    rank = Rank(sys.argv[3])
    getattr(sys.modules["__main__"], sys.argv[2])(rank, *rank.arguments)
    return True


def run(*measures: Callable[..., str]) -> None:
    """Be one of a script's ranks, or its command: with several `measures` each is a subcommand of its own name."""
    if be_rank():
        return
    script = sys.modules["__main__"]
    # The variables of the caller's shell are no part of a measurement.
    for name in [each for each in os.environ if each.startswith("NETFOLD_") and not each.startswith("NETFOLD_BENCH_")]:
        del os.environ[name]
    app = typer.Typer(add_completion=False, help=script.__doc__, rich_markup_mode=None, pretty_exceptions_enable=False)
    for measure in measures:
        app.command(measure.__name__.replace("_", "-"), help=None if len(measures) > 1 else script.__doc__)(
            _command(measure)
        )
    app()


def _command(measure: Callable[..., str]) -> Callable[..., None]:
    """`measure` as a command that writes the page: the parameters of `measure`, and --output."""
    title = inspect.getdoc(measure).splitlines()[0].rstrip(".")  # type: ignore[union-attr]

    def command(output: Path, **settings: Any) -> None:
        load = os.getloadavg()[0]
        with exit_on_signals():
            body = measure(**settings)
        shown = ", ".join(f"{name} {value}" for name, value in settings.items() if value is not None)
        line = shlex.join(["bench/" + Path(sys.argv[0]).name, *sys.argv[1:]])
        head = f"`{line}` ({shown or 'no options'}); ranks were started {_launches} times."
        text = f"# {title}\n\n{head} {spoken((load, os.getloadavg()[0]))}\n\n{body.strip()}\n"
        output.write_text(text)
        print(text)

    default = RESULTS / f"{measure.__name__}.md"
    annotation = Annotated[Path, typer.Option("--output", "-o", help="The page to write.")]
    signature = inspect.signature(measure, eval_str=True)
    option = inspect.Parameter("output", inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
    parameters = [*signature.parameters.values(), option]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__doc__ = measure.__doc__
    return command
