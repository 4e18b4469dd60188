"""One listening port per process: other ranks connect to it to form a group, to reconnect, and to send requests.

A thread with an asyncio loop accepts connections as long as a group is registered, and makes this process's own
connections to other listeners (`Listener.run`). Every peer is authenticated before any other byte is read
(handshake.py). Handshakes run side by side, each with its own timeout, so that an unauthenticated peer delays nobody;
switch_protocol/acceptor.py bounds their number.
The last _MAX_REMEMBERED groups that ended are remembered with the reason: a rank that asks for such a group gets the
reason instead of a closed port.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import os
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from netfold.bootstrap import handshake
from netfold.bootstrap.handshake import Hello
from netfold.bootstrap.secure_stream import secure_stream
from netfold.errors import RendezvousError
from netfold.switch_protocol import control_messages
from netfold.switch_protocol.acceptor import Acceptor, Peer
from netfold.switch_protocol.control_messages import format_endpoint

# How long an unauthenticated peer can keep a connection open. On a crowded host a rank takes seconds to reply.
HANDSHAKE_TIMEOUT_S = 20.0
_RETRY_S = 0.05  # between two searches for a free port
_REFUSAL_S = 1.0
_CANCEL_S = 0.05  # between two cancellations of a task, when the listener closes
# First connections that this process makes at once. More wait, and their time has not begun.
_MAX_CONNECTING = 64
_MAX_REMEMBERED = 256

Result = TypeVar("Result")
ConnectionKey = tuple[int, int, int]  # peer, lane, rail
# As native groups report it: kind, the rank at fault (-1: not known), and a sentence.
Failure = tuple[int, int, str]
# (the requesting rank, its request) -> the reply, and a function that takes the connection once the reply is sent.
RequestHandler = Callable[
    [int, control_messages.Message], tuple[control_messages.Message, Callable[[socket.socket], None] | None]
]


class Receiver(Protocol):
    """Takes the connections of a group that runs. All calls are on the listener's thread."""

    def admit(self, key: ConnectionKey) -> bool:
        """Whether a peer that has proved who it is may connect. `take` or `miss` follows."""
        ...

    def take(self, key: ConnectionKey, stream: socket.socket) -> None:
        """Takes ownership of an admitted connection."""
        ...

    def miss(self, key: ConnectionKey) -> None:
        """The admitted connection was lost before it was complete."""
        ...


@dataclass
class RegisteredGroup:
    """A rank of a group whose listener accepts connections for it. They are gathered here while the group starts."""

    secret: bytes
    rank: int
    size: int
    lanes: int
    rails: int
    security: int = 0  # index into SECURITIES, for every connection
    # Handles a request from a rank of the group, on a thread of its own. Set once the group runs.
    handler: RequestHandler | None = None
    # Set once the group runs.
    receiver: Receiver | None = None
    listener: Listener | None = None
    accepted: dict[ConnectionKey, socket.socket] = field(default_factory=dict)
    # First connections of ranks whose group runs already, until this one runs.
    early: dict[ConnectionKey, socket.socket] = field(default_factory=dict)
    duplicate: int | None = None  # a rank that connected twice as the same lane and rail
    # Set once this rank has given up: what connections of these ranks are sent that come later.
    refusal: tuple[frozenset[int], bytes] | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def key(self) -> tuple[bytes, int]:
        return handshake.token_of(self.secret), self.rank

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """As Listener.run, at the listener where this group is registered."""
        assert self.listener is not None
        return self.listener.run(work)

    def add_connection(self, key: ConnectionKey, stream: socket.socket) -> None:
        with self.changed:
            refusal = self.refusal
            if refusal is None and key not in self.accepted:
                self.accepted[key] = stream
            else:
                if refusal is None:
                    self.duplicate = key[0]
                elif key[0] in refusal[0]:
                    with contextlib.suppress(OSError):  # it has left
                        stream.settimeout(_REFUSAL_S)
                        stream.sendall(refusal[1])
                stream.close()
            self.changed.notify_all()

    def refuse_later(self, peers: Iterable[int] = (), message: bytes = b"") -> None:
        """Close connections that come from now on: a thread may still make one, and the other rank would wait.

        message: for these ranks, before that.
        """
        with self.changed:
            if self.refusal is None:
                self.refusal = frozenset(peers), message

    def close_connections(self) -> None:
        """Close the connections that were not given to a native group, and those that come later."""
        self.refuse_later()
        with self.changed:
            for stream in (*self.accepted.values(), *self.early.values()):
                stream.close()
            self.accepted.clear()
            self.early.clear()

    def accepts(self, hello: Hello) -> bool:
        if hello.security != self.security:
            return False
        if hello.size != self.size or hello.initiator >= self.size or hello.initiator == self.rank:
            return False
        if hello.purpose == handshake.CALL:
            return True
        is_of_mesh = hello.purpose in (handshake.JOIN, handshake.FIRST)
        return is_of_mesh and hello.lane < self.lanes and hello.rail < self.rails


class Listener:
    """Listens on the same port of several addresses."""

    def __init__(self, rank: int, hosts: Sequence[str], ports: range, deadline: float) -> None:
        self._sockets = _listen(rank, hosts, ports, deadline)
        self.port = int(self._sockets[0].getsockname()[1])
        self.hosts = [str(listener.getsockname()[0]) for listener in self._sockets]
        self.references = 0  # under _open_listeners_lock
        self._registered_groups: dict[tuple[bytes, int], RegisteredGroup] = {}
        self._remembered: OrderedDict[tuple[bytes, int], RegisteredGroup] = OrderedDict()
        self.connecting = asyncio.Semaphore(_MAX_CONNECTING)
        self._closed, self._close_lock = False, threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._acceptor = Acceptor(self._receive, timeout_s=HANDSHAKE_TIMEOUT_S)
        self._thread = threading.Thread(target=self._run, name="netfold listener", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run on the listener's thread, and wait for the result. Raises as `work` does; OSError once it is closed."""
        with self._close_lock:
            if self._closed:
                work.close()
                raise OSError("this rank's listener was closed")
            # Before the stop that `close` requests, which cancels all that has begun.
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise OSError("this rank's listener was closed") from None
        finally:
            future.cancel()  # where the waiting thread was interrupted

    def call_soon(self, call: Callable[..., object], *arguments: Any) -> None:
        """Call on the listener's thread, without waiting; not at all once the listener is closed."""
        with self._close_lock:
            if not self._closed:
                self._loop.call_soon_threadsafe(call, *arguments)

    def register(self, registered_group: RegisteredGroup) -> None:
        registered_group.listener = self
        self._registered_groups[registered_group.key] = registered_group

    def deregister(
        self,
        registered_group: RegisteredGroup,
        failure: Failure | None,
        calls: int = 0,
        expired: tuple[int, int] = (0, 0),
    ) -> None:
        """Close the group to new connections. Ranks that ask for the group get these values.

        failure: None where the rank closed the group.
        calls: how many collectives the rank has made.
        expired: as in `expired_of` (connection_manager.py).
        """
        if self._registered_groups.pop(registered_group.key, None) is None:
            return
        reply = {"type": "ended", "failure": failure, "calls": calls, "expired": expired}
        registered_group.handler = lambda _, __: (reply, None)
        registered_group.receiver = None
        self._remembered[registered_group.key] = registered_group
        while len(self._remembered) > _MAX_REMEMBERED:
            self._remembered.popitem(last=False)

    def close(self) -> None:
        with self._close_lock:
            self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self.close_sockets()

    def close_sockets(self) -> None:
        for listener in self._sockets:
            listener.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        for listener in self._sockets:
            self._loop.call_soon(self._acceptor.start, listener)
        self._loop.run_forever()
        # Repeatedly: before Python 3.12 a wait_for that ends at that moment loses the cancellation.
        while pending := asyncio.all_tasks(self._loop):
            for task in pending:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(pending, timeout=_CANCEL_S))
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _receive(self, connecting: Peer) -> None:
        stream, kept = connecting.stream, False
        receiver: Receiver | None = None  # that has admitted this connection
        key: ConnectionKey = (-1, 0, 0)

        def admits(hello: Hello) -> bool:
            nonlocal receiver, key
            registered_group = self._find(hello)
            if registered_group is None or hello.purpose != handshake.FIRST or registered_group.receiver is None:
                return registered_group is not None
            key = hello.initiator, hello.lane, hello.rail
            if not registered_group.receiver.admit(key):
                return False
            receiver = registered_group.receiver
            return True

        try:
            accepted = await handshake.accept(stream, self._secret_of, admits)
            if accepted is None:
                return
            connecting.authenticated()
            hello, session = accepted
            stream = secure_stream(stream, session)
            registered_group = self._find(hello)
            if registered_group is None:
                return
            key = hello.initiator, hello.lane, hello.rail
            if hello.purpose == handshake.FIRST and receiver is None:
                if registered_group.receiver is None:
                    kept = key not in registered_group.early and registered_group.refusal is None
                    if kept:
                        registered_group.early[key] = stream
                    return
                if not registered_group.receiver.admit(key):  # the group began to run in between
                    return
                receiver = registered_group.receiver
            if receiver is not None:
                kept = True
                receiver.take(key, stream)
            elif hello.purpose == handshake.JOIN:
                kept = True
                registered_group.add_connection(key, stream)
            elif registered_group.handler is not None:
                await self._loop.run_in_executor(
                    None, _handle_request, stream, registered_group.handler, hello.initiator
                )
        except (OSError, EOFError, TimeoutError, asyncio.TimeoutError, control_messages.ProtocolError):
            pass  # an unauthenticated peer, or a rank that gave up and may come again
        finally:
            if not kept:
                stream.close()
                if receiver is not None:
                    receiver.miss(key)

    def _find(self, hello: Hello) -> RegisteredGroup | None:
        key = (hello.token, hello.target)
        registered_group = self._registered_groups.get(key)
        if registered_group is None and hello.purpose == handshake.CALL:
            registered_group = self._remembered.get(key)
        return registered_group if registered_group is not None and registered_group.accepts(hello) else None

    def _secret_of(self, hello: Hello) -> bytes | None:
        registered_group = self._find(hello)
        return None if registered_group is None else registered_group.secret


def _handle_request(stream: socket.socket, handler: RequestHandler, peer: int) -> None:
    stream.settimeout(HANDSHAKE_TIMEOUT_S)
    reply, then = handler(peer, control_messages.receive(stream))
    control_messages.send(stream, reply)
    if then is not None:
        then(stream)


def _listen(rank: int, hosts: Sequence[str], ports: range, deadline: float) -> list[socket.socket]:
    """Listen on the first port that is free on all hosts."""
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
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=4096)
    listener.setblocking(False)
    return listener


_open_listeners: dict[tuple[tuple[str, ...], range], Listener] = {}
_open_listeners_lock = threading.Lock()


def acquire_listener(rank: int, hosts: Sequence[str], ports: range, deadline: float) -> Listener:
    """This process's listener on these addresses and ports, opened for its first user. Raises RendezvousError.

    Each call needs a `release_listener`.
    """
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
    """A forked child must not keep its parent's port open: other ranks would think that the parent lives."""
    global _open_listeners_lock
    _open_listeners_lock = threading.Lock()
    for listener in _open_listeners.values():
        listener.close_sockets()
    _open_listeners.clear()


os.register_at_fork(after_in_child=_forget_in_child)
