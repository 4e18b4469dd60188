"""One listening port a process: where other ranks join a group, make a broken connection again, and ask what this rank
is doing.

A thread waits there, in asyncio, for as long as some group is at home. Every visitor is proved before it is heard
(handshake.py), all side by side, each within a time of its own, so that a stranger holds nobody up. A group that has
ended is remembered for a while, with the reason: whoever asks for it then hears that instead of a closed port.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from netfold.bootstrap import handshake
from netfold.bootstrap.handshake import Hello
from netfold.bootstrap.secure_stream import secure_stream
from netfold.errors import RendezvousError
from netfold.switch_protocol import control_messages
from netfold.switch_protocol.control_messages import format_endpoint

# A stranger keeps a visit open for no longer than this.
HANDSHAKE_TIMEOUT_S = 5.0
_RETRY_S = 0.05
_MOST_VISITS = 4096
_MOST_REMEMBERED = 256

ConnectionKey = tuple[int, int, int]  # peer, lane, rail
Failure = tuple[
    int, int, str
]  # its kind, the rank at fault (-1: nobody knows) and what befell, as native groups say it
# (the rank that asks, its question) -> the reply, and what is done with the connection once the reply is on its way.
RequestHandler = Callable[
    [int, control_messages.Message], tuple[control_messages.Message, Callable[[socket.socket], None] | None]
]


@dataclass
class RegisteredGroup:
    """A rank of a group, at home behind a listener. Its sockets arrive here while the group comes together."""

    secret: bytes
    rank: int
    size: int
    lanes: int
    rails: int
    security: int = 0  # of handshake.SECURITIES, for every connection
    # Answers a question from a rank of the group; on a thread of its own. Set once the group stands.
    handler: RequestHandler | None = None
    accepted: dict[ConnectionKey, socket.socket] = field(default_factory=dict)
    duplicate: int | None = None  # a rank that came again to a place that was taken
    changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def key(self) -> tuple[bytes, int]:
        return handshake.token_of(self.secret), self.rank

    def add_connection(self, place: ConnectionKey, stream: socket.socket) -> None:
        with self.changed:
            if place in self.accepted:
                self.duplicate = place[0]
                stream.close()
            else:
                self.accepted[place] = stream
            self.changed.notify_all()

    def accepts(self, hello: Hello) -> bool:
        if hello.security != self.security:
            return False
        if hello.size != self.size or hello.initiator >= self.size or hello.initiator == self.rank:
            return False
        if hello.purpose == handshake.CALL:
            return True
        return hello.purpose == handshake.JOIN and hello.lane < self.lanes and hello.rail < self.rails


class Listener:
    """Listens on the same port of each of some addresses."""

    def __init__(self, rank: int, hosts: Sequence[str], ports: range, deadline: float) -> None:
        self._sockets = _listen(rank, hosts, ports, deadline)
        self.port = int(self._sockets[0].getsockname()[1])
        self.hosts = [str(listener.getsockname()[0]) for listener in self._sockets]
        self.references = 0  # under _open_listeners_lock
        self._registered_groups: dict[tuple[bytes, int], RegisteredGroup] = {}
        self._remembered: OrderedDict[tuple[bytes, int], RegisteredGroup] = OrderedDict()
        self._visits = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="netfold listener", daemon=True)
        self._thread.start()

    def register(self, registered_group: RegisteredGroup) -> None:
        self._registered_groups[registered_group.key] = registered_group

    def deregister(
        self,
        registered_group: RegisteredGroup,
        failure: Failure | None,
        calls: int = 0,
        expired: tuple[int, int] = (0, 0),
    ) -> None:
        """It has left, in order or after a failure; whoever asks hears that. calls: the collectives that it made;
        expired: as native groups say it."""
        if self._registered_groups.pop(registered_group.key, None) is None:
            return
        reply = {"type": "ended", "failure": failure, "calls": calls, "expired": expired}
        registered_group.handler = lambda _, __: (reply, None)
        self._remembered[registered_group.key] = registered_group
        while len(self._remembered) > _MOST_REMEMBERED:
            self._remembered.popitem(last=False)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self.close_sockets()

    def close_sockets(self) -> None:
        for listener in self._sockets:
            listener.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        tasks = [self._loop.create_task(self._serve(listener)) for listener in self._sockets]
        self._loop.run_forever()
        pending = [*tasks, *asyncio.all_tasks(self._loop)]
        for task in pending:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _serve(self, listener: socket.socket) -> None:
        visits: set[asyncio.Task[None]] = set()
        while True:
            try:
                stream, _ = await self._loop.sock_accept(listener)
            except OSError:  # out of descriptors: those who come find no open listener until some are free
                await asyncio.sleep(_RETRY_S)
                continue
            if self._visits >= _MOST_VISITS:
                stream.close()
                continue
            self._visits += 1
            visit = self._loop.create_task(self._receive(stream))
            visits.add(visit)
            visit.add_done_callback(visits.discard)

    async def _receive(self, stream: socket.socket) -> None:
        kept = False
        try:
            stream.setblocking(False)
            opened = await asyncio.wait_for(handshake.accept(stream, self._secret_of), HANDSHAKE_TIMEOUT_S)
            if opened is None:
                return
            hello, session = opened
            stream = secure_stream(stream, session)
            registered_group = self._find(hello)
            if registered_group is None:
                return
            if hello.purpose == handshake.JOIN:
                kept = True
                registered_group.add_connection((hello.initiator, hello.lane, hello.rail), stream)
            elif registered_group.handler is not None:
                await self._loop.run_in_executor(None, _converse, stream, registered_group.handler, hello.initiator)
        except (OSError, EOFError, TimeoutError, asyncio.TimeoutError, control_messages.ProtocolError):
            pass  # a stranger, or a rank that gave up: the real one, if any, is still to come
        finally:
            self._visits -= 1
            if not kept:
                stream.close()

    def _find(self, hello: Hello) -> RegisteredGroup | None:
        key = (hello.token, hello.target)
        registered_group = self._registered_groups.get(key)
        if registered_group is None and hello.purpose == handshake.CALL:
            registered_group = self._remembered.get(key)
        return registered_group if registered_group is not None and registered_group.accepts(hello) else None

    def _secret_of(self, hello: Hello) -> bytes | None:
        registered_group = self._find(hello)
        return None if registered_group is None else registered_group.secret


def _converse(stream: socket.socket, answer: RequestHandler, peer: int) -> None:
    stream.settimeout(HANDSHAKE_TIMEOUT_S)
    reply, then = answer(peer, control_messages.receive(stream))
    control_messages.send(stream, reply)
    if then is not None:
        then(stream)


def _listen(rank: int, hosts: Sequence[str], ports: range, deadline: float) -> list[socket.socket]:
    """Listeners on the first port that is free on all of them."""
    while True:
        for port in ports:
            listeners: list[socket.socket] = []
            try:
                for host in hosts:
                    listeners.append(_bound(host, listeners[0].getsockname()[1] if listeners else port))
                return listeners
            except OSError as error:
                for listener in listeners:
                    listener.close()
                if error.errno != errno.EADDRINUSE:
                    where = format_endpoint(hosts[len(listeners)], port)
                    raise RendezvousError(
                        f"rank {rank} cannot listen on {where}: {error} (NETFOLD_INTERFACE)"
                    ) from None
        if time.monotonic() > deadline:
            raise RendezvousError(
                f"rank {rank}: no port of {ports.start}-{ports.stop - 1} is free on {', '.join(hosts)} "
                "(NETFOLD_PORTS); every process of a host needs one"
            )
        time.sleep(_RETRY_S)


def _bound(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        # Connections of former processes keep the port, but nobody listens there.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(4096)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


_open_listeners: dict[tuple[tuple[str, ...], range], Listener] = {}
_open_listeners_lock = threading.Lock()


def acquire_listener(rank: int, hosts: Sequence[str], ports: range, deadline: float) -> Listener:
    """This process's listener on those addresses and ports, opened for the first and kept for all who ask. Give it back
    by `release_listener`. Raises RendezvousError."""
    key = (tuple(hosts), ports)
    with _open_listeners_lock:
        if key not in _open_listeners:
            _open_listeners[key] = Listener(rank, hosts, ports, deadline)
        _open_listeners[key].references += 1
        return _open_listeners[key]


def release_listener(listener: Listener) -> None:
    with _open_listeners_lock:
        listener.references -= 1
        if listener.references > 0:
            return
        for key in [key for key, each in _open_listeners.items() if each is listener]:
            del _open_listeners[key]
    listener.close()


def _forget_in_child() -> None:
    """A child made by fork must not keep its parent's port open: others would think that the parent lives."""
    global _open_listeners_lock
    _open_listeners_lock = threading.Lock()
    for listener in _open_listeners.values():
        listener.close_sockets()
    _open_listeners.clear()


os.register_at_fork(after_in_child=_forget_in_child)
