"""The ranks of a run: processes that connect to this one, obey its commands and answer."""

import contextlib
import json
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from netfold.rack.processes import DRAIN_S, FAILURE_GRACE_S, Process, follow, stop

# Lines kept of each process: enough for a traceback and what led to it.
KEPT_LINES = 60
_POLL_S = 0.2

Lines = deque[str]
Message = dict[str, Any]


class BenchError(RuntimeError):
    """The ranks came to no result. The message holds the output of the rank that failed first."""


class Ranks:
    """All ranks of all worlds. One world has the turn; the other ranks sleep in a read meanwhile and use no CPU.

    versions, congestion_control: as the ranks reported them.
    """

    def __init__(self, processes: Mapping[str, Process], workers: int, deadline_s: float, switch_lines: Lines) -> None:
        """processes: by the name that their output gets; each must run until `end`. An MPI has one, its launcher."""
        self.workers = workers
        self.versions: dict[str, str] = {}
        self.congestion_control = ""
        self.load_before = os.getloadavg()[0]
        self._processes = processes
        self._deadline_s = deadline_s
        self._deadline = time.monotonic() + deadline_s
        self._outputs = {"switch": switch_lines, **{name: Lines(maxlen=KEPT_LINES) for name in processes}}
        self._readers = [follow(process, self._outputs[name].append) for name, process in processes.items()]
        self._connections: dict[str, dict[int, _Connection]] = {}

    def accept(self, server: socket.socket, worlds: list[str]) -> None:
        """Wait until every rank of every world has connected."""
        self._connections = {world: {} for world in worlds}
        server.settimeout(_POLL_S)
        new: list[_Connection] = []
        while any(len(ranks) < self.workers for ranks in self._connections.values()):
            self._watch()
            with contextlib.suppress(TimeoutError):
                new.append(_Connection(server.accept()[0]))
            for connection in list(new):
                if (hello := self._answer(connection)) is not None:
                    new.remove(connection)
                    self._connections[hello["world"]][hello["rank"]] = connection
                    self.versions |= hello["versions"]
                    self.congestion_control = hello["congestion_control"]

    def tell(self, world: str, command: str, ranks: int = 0, /, **arguments: Any) -> list[Message]:
        """Send one command to a world's first `ranks` (0: all); return their answers in the order of ranks."""
        connections = [self._connections[world][rank] for rank in range(ranks or self.workers)]
        for connection in connections:
            connection.send({"do": command, **arguments})
        answers: dict[_Connection, Message] = {}
        with selectors.DefaultSelector() as selector:
            for connection in connections:
                selector.register(connection.socket, selectors.EVENT_READ, connection)
            while True:
                for key, _ in selector.select(_POLL_S):
                    if (answer := self._answer(key.data)) is not None:
                        answers[key.data] = answer
                        selector.unregister(key.fileobj)
                if len(answers) == len(connections):
                    return [answers[connection] for connection in connections]
                self._watch()

    def end(self) -> None:
        """Tell all ranks to end, and wait for them."""
        for connection in self._all():
            connection.send({"do": "end"})
        while self._any_runs():
            self._watch(ended_is_well=True)
            time.sleep(0.02)

    def close(self) -> None:
        """Close all connections, also after an error: a rank then ends in order, and MPI removes its shared memory."""
        for connection in self._all():
            connection.socket.close()
        until = time.monotonic() + FAILURE_GRACE_S
        while time.monotonic() < until and self._any_runs():
            time.sleep(0.02)

    def _watch(self, *, ended_is_well: bool = False) -> None:
        """Raise BenchError where a process has ended, or the deadline is past."""
        for name, process in self._processes.items():
            code = process.poll()
            if code is not None and not (ended_is_well and code == 0):
                time.sleep(_POLL_S)  # a rank may have sent its traceback a moment before
                for connection in self._all():
                    self._answer(connection)
                self._fail(f"{name} ended with exit code {code}", name)
        if time.monotonic() > self._deadline:
            self._fail(
                f"the workers had not ended after {self._deadline_s:g} s; fewer sizes (-e), rounds (-n) or more "
                "--timeout"
            )

    def _answer(self, connection: "_Connection") -> Message | None:
        """Return what a rank has sent, None for nothing. Raises BenchError where that is a traceback."""
        answer = connection.poll()
        if answer is not None and "traceback" in answer:
            self._fail(f"{answer['who']} failed: {answer['traceback'].rstrip()}")
        return answer

    def _fail(self, reason: str, process: str | None = None) -> None:
        """Stop all processes. Raise BenchError with the output of one of them (None: of all) and of the switch."""
        stop(list(self._processes.values()))
        for reader in self._readers:
            reader.join(DRAIN_S)
        shown = [*(self._processes if process is None else [process]), "switch"]
        raise BenchError("\n".join([reason, *(f"{name}| {line}" for name in shown for line in self._outputs[name])]))

    def _any_runs(self) -> bool:
        return any(process.poll() is None for process in self._processes.values())

    def _all(self) -> list["_Connection"]:
        return [connection for ranks in self._connections.values() for connection in ranks.values()]


class _Connection:
    """Lines of JSON to and from one rank."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._received = b""

    def send(self, message: Message) -> None:
        # A rank that is gone shows as an ended process, with its reason.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def poll(self) -> Message | None:
        """Return a message if a whole one has arrived. Never waits."""
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            while b"\n" not in self._received:
                part = self.socket.recv(1 << 16, socket.MSG_DONTWAIT)
                if not part:
                    return None
                self._received += part
        line, found, rest = self._received.partition(b"\n")
        if not found:
            return None
        self._received = rest
        message: Message = json.loads(line)
        return message
