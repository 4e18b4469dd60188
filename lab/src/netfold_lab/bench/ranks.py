"""Ranks of a job: starts them in a network, sends them orders, and collects their answers in time.

A rank is a process that connects to the benchmark through a folder and obeys one order at a time. Between orders it
sleeps in a read, so ranks without the turn use no CPU. Orders and answers are anything that pickle takes.
"""

import contextlib
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from typing import Any

from netfold_lab.bench.backends import MPIS
from netfold_lab.bench.network import Network
from netfold_lab.rack.processes import DRAIN_S, FAILURE_GRACE_S, Process, follow, stop, uninterrupted, wait_for_end

# Lines kept of each process: enough for a traceback and what led to it.
KEPT_LINES = 60
# The number of times that this process has started ranks.
launches = 0
_POLL_S = 0.2
# The benchmark stops a rank at the deadline. If the benchmark is gone, the kernel does, so many seconds later.
_GRACE_S = 10
# In place of an answer: the rank has closed its connection.
_ENDED = object()


class BenchError(RuntimeError):
    """The ranks came to no result. The message holds the output of the rank that failed first."""


@dataclass(frozen=True)
class _Failure:
    traceback: str


class Ranks:
    """The ranks of one job, in the benchmark's process.

    folder: all ranks share it; it is removed with them.
    processes: by the name that their output gets. An MPI has one, its launcher.
    ready: by rank, what each said when it was ready for orders.
    """

    def __init__(
        self, name: str, folder: Path, deadline_s: float, switch_lines: deque[str], say: Callable[[str], object]
    ) -> None:
        self.folder = folder
        self.processes: dict[str, Process] = {}
        self.ready: list[Any] = []
        self._name = name
        self._deadline_s = deadline_s
        self._deadline = time.monotonic() + deadline_s
        self._say = say
        self._outputs = {"switch": switch_lines}
        self._readers: list[threading.Thread] = []
        self._connections: list[Connection] = []

    def ask(self, *order: Any, first: int | None = None) -> list[Any]:
        """Send `order` to every rank, or to the `first` so many; return the answers by rank.

        Raises BenchError where a rank fails or ends, and after the deadline.
        """
        asked = self._connections[:first]
        for connection in asked:
            # A rank that is gone shows as an ended process, with its reason.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.send(order)
        found: dict[Connection, Any] = {}
        while True:
            for ready in wait([each for each in asked if each not in found], _POLL_S):
                assert isinstance(ready, Connection)
                answer = self._receive(ready)
                if answer is _ENDED:
                    time.sleep(_POLL_S)
                else:
                    found[ready] = answer
            if len(found) == len(asked):
                return [found[connection] for connection in asked]
            self._watch()

    def _add(self, name: str, process: Process) -> None:
        lines: deque[str] = deque(maxlen=KEPT_LINES)

        def read(line: str) -> None:
            lines.append(line)
            self._say(f"{name}| {line}")

        self.processes[name], self._outputs[name] = process, lines
        self._readers.append(follow(process, read))

    def _connect(self, server: socket.socket, size: int, arguments: Sequence[Any]) -> None:
        """Wait until every rank has connected and, with these arguments, is ready."""
        new: list[Connection] = []
        by_rank: dict[int, Connection] = {}
        while len(by_rank) < size:
            for ready in wait([server, *new], _POLL_S):
                if ready is server:
                    new.append(Connection(server.accept()[0].detach()))
                    continue
                assert isinstance(ready, Connection)
                new.remove(ready)
                rank = self._receive(ready)
                if rank is not _ENDED:
                    by_rank[rank] = ready
            self._watch()
        self._connections = [by_rank[rank] for rank in range(size)]
        self.ready = self.ask(*arguments)

    def _end(self) -> None:
        """Let all ranks end, and wait for them."""
        self._disconnect()
        runs = True
        while runs:
            runs = any(process.poll() is None for process in self.processes.values())
            self._watch(ended_is_well=True)
            time.sleep(0.02)

    def _close(self) -> None:
        """End the ranks, also after an error: if they can they end in order, and MPI removes its shared memory."""
        self._disconnect()
        processes = list(self.processes.values())
        wait_for_end(processes, FAILURE_GRACE_S)
        stop(processes)

    def _disconnect(self) -> None:
        for connection in self._connections:
            connection.close()
        self._connections = []

    def _watch(self, *, ended_is_well: bool = False) -> None:
        """Raise BenchError where a process has ended, or the deadline is past."""
        for name, process in self.processes.items():
            code = process.poll()
            if code is not None and not (ended_is_well and code == 0):
                # Another rank may have sent the traceback that explains this a moment before.
                for connection in wait(self._connections, _POLL_S):
                    assert isinstance(connection, Connection)
                    self._receive(connection)
                self._fail(f"{name} ended with exit code {code}", name)
        if time.monotonic() > self._deadline:
            self._fail(
                f"the workers had not ended after {self._deadline_s:g} s; fewer sizes (-e), rounds (-n) or more "
                "--timeout"
            )

    def _receive(self, connection: Connection) -> Any:
        """Return what a rank has sent, _ENDED where it has ended. Raises BenchError where that is a traceback."""
        try:
            message = connection.recv()
        except (EOFError, ConnectionResetError):
            return _ENDED
        if isinstance(message, _Failure):
            rank = f" rank {self._connections.index(connection)}" if connection in self._connections else ""
            self._fail(f"{self._name}{rank} failed: {message.traceback.rstrip()}")
        return message

    def _fail(self, reason: str, process: str | None = None) -> None:
        """Stop all processes. Raise BenchError with the output of one of them (None: of all) and of the switch."""
        stop(list(self.processes.values()))
        for reader in self._readers:
            reader.join(DRAIN_S)
        shown = [*(self.processes if process is None else [process]), "switch"]
        lines = [f"{name}| {line}" for name in shown for line in list(self._outputs[name])[-KEPT_LINES:]]
        raise BenchError("\n".join([reason, *lines]))


@contextlib.contextmanager
def start_ranks(
    network: Network,
    name: str,
    argv: Sequence[str],
    arguments: Sequence[Any] = (),
    *,
    deadline_s: float,
    hosts: Sequence[int] | None = None,
    environment: Mapping[str, str] | None = None,
    say: Callable[[str], object] = lambda line: None,
) -> Iterator[Ranks]:
    """Start ranks, and wait until all serve orders. No rank is left when the block is done.

    name: of the job, in errors and before lines of output; an MPI's name starts the ranks by its launcher.
    argv: of every rank, which calls `connect` with the two words that follow it: the folder and `deadline_s`.
    arguments: of every rank, from `Orders.begin`.
    hosts: the host of each rank; None: as the place of `network` says.
    say: gets every line of output.
    Raises BenchError, also where a rank ends with an error after the block; PeerMissingError where the MPI is missing.
    """
    global launches
    launches += 1
    if hosts is None:
        size = network.place.ranks
        hosts = [rank * network.hosts // size for rank in range(size)]
    # The kernel takes 107 bytes of a Unix socket's path.
    place = "/tmp" if len(tempfile.gettempdir()) > 60 else None
    with (
        tempfile.TemporaryDirectory(prefix="netfold-bench-", dir=place) as folder,
        socket.socket(socket.AF_UNIX) as server,
    ):
        server.bind(f"{folder}/orders")
        server.listen(len(hosts))
        command = [*argv, folder, str(deadline_s)]
        ranks = Ranks(name, Path(folder), deadline_s, network.switch_lines, say)
        try:
            if name in MPIS:
                ranks._add(name, network.spawn_mpi(name, command, ranks.folder))
            else:
                shared = {**_launched(network, len(hosts)), **(environment or {})}
                for rank, host in enumerate(hosts):
                    process = network.spawn(host, command, {"RANK": str(rank), **shared})
                    ranks._add(f"{name} rank {rank}", process)
            ranks._connect(server, len(hosts), arguments)
            yield ranks
            ranks._end()
        finally:
            with uninterrupted():
                ranks._close()


def _launched(network: Network, size: int) -> dict[str, str]:
    """Return the variables that a launcher sets for all ranks; a rack has set some of them for its hosts."""
    if network.rack is not None:
        return {"WORLD_SIZE": str(size)}
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    return {
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


class Orders:
    """A rank's end of its connection to the benchmark."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def begin(self, rank: int) -> tuple[Any, ...]:
        """Say which rank this is, and return the arguments of the job."""
        self._connection.send(rank)
        arguments: tuple[Any, ...] = self._connection.recv()
        return arguments

    def serve(self, answer: Callable[..., Any], ready: Any = None) -> None:
        """Send the benchmark `ready`, then `answer(*order)` for every order, until the benchmark ends the job."""
        self._connection.send(ready)
        while True:
            try:
                order = self._connection.recv()
            except (EOFError, ConnectionResetError):
                return
            self._connection.send(answer(*order))


@contextlib.contextmanager
def connect(folder: str, deadline_s: str) -> Iterator[Orders]:
    """Connect a rank to the benchmark, which gets the traceback of an error in the block."""
    signal.alarm(int(float(deadline_s)) + _GRACE_S)
    with Client(f"{folder}/orders") as connection:
        try:
            yield Orders(connection)
        except Exception:
            with contextlib.suppress(OSError):
                connection.send(_Failure(traceback.format_exc()))
            raise
