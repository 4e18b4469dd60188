"""A store that rank 0 or `netfold store` serves over TCP, for ranks that share no folder and have no torch.

Like torch's TCPStore it is plaintext and authenticates nobody: it protects the job's secret only from hosts that cannot
reach the port. (The standard library's managers unpickle what unauthenticated peers send; key-value stores on PyPI need
a server of their own.) Requests and replies are bounded messages of `netfold.switch_protocol.control_messages`.
Whatever clients send, the store takes at most MAX_BYTES for values, and MAX_PENDING_BYTES for requests and replies.

    client -> server   hello  job             is this the store of my job?
                       set    key, value
                       get    key, timeout_s  waits at the server
                       add    key, amount
    server -> client   ok     value           a get's value, an add's new total; the next request may follow
                       no     reason          then the connection ends, except after a get that timed out
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from netfold.bootstrap.addresses import encoded
from netfold.bootstrap.launchers import Placement
from netfold.bootstrap.store import MAX_KEYS, MAX_REQUEST_BYTES
from netfold.errors import RendezvousError
from netfold.options import timeout_seconds
from netfold.switch_protocol import control_messages
from netfold.switch_protocol.acceptor import MAX_UNAUTHENTICATED, Acceptor, Peer
from netfold.switch_protocol.open_files import allow_open_files

# How many ports are tried from the given one on: another program, often torch's store, may use the first.
PORTS = 8
# Connections of one store: one a rank, and one more for each concurrent request. More are closed.
MAX_CONNECTIONS = 8192
# All keys and values together. An address and a job's description are below 1 KB per rank.
MAX_BYTES = 64 << 20
# What Python takes for a key and its value beside their bytes, about.
ENTRY_BYTES = 256
# Incomplete requests, waiting gets and unsent replies of all clients together. One more ends its connection.
MAX_PENDING_BYTES = 32 << 20
# Bound of a counter's absolute value: what control messages can carry.
MAX_COUNT = 1 << 62
# The job of a store of `netfold store`, which serves one run of one job and outlives its ranks.
OUTLIVING = "netfold store"
_RETRY_S = 0.05
_HELLO_TIMEOUT_S = 2.0
_MAX_HELLO_BYTES = 4096
# The server replies to a get at its timeout; the client waits so much longer.
_GRACE_S = 5.0
_NOT_SET = {"type": "no", "reason": "not set in time"}


_process_stores: dict[tuple[int, Placement], TcpStore] = {}
_process_lock = threading.Lock()


def process_store(place: Placement, timeout_s: float) -> TcpStore:
    """This rank's store for as long as the process lives: all groups of a job use the same one. Rank 0 serves it.

    With one store a group, rank 0 would close it when another rank already uses it for the next group.
    """
    key = os.getpid(), place
    with _process_lock:
        found = _process_stores.get(key)
    if found is None:
        made = TcpStore(place.host, place.port, place.job, serve=place.rank == 0, timeout_s=timeout_s)
        with _process_lock:
            found = _process_stores.setdefault(key, made)
    return found


def outliving_store(endpoint: str, timeout_s: float) -> TcpStore:
    """The store that `netfold store` serves. ValueError for no endpoint; RendezvousError where none answers in time."""
    host, port = control_messages.parse_endpoint(endpoint, what="NETFOLD_STORE")
    return TcpStore(host, port, OUTLIVING, serve=False, timeout_s=timeout_s, advice="does `netfold store` run there?")


class TcpStoreServer:
    """Serves until closed, on one thread: requests are short, and a `get` that waits is an entry of a table."""

    def __init__(self, host: str, port: int, job: str, *, variable: str = "MASTER_PORT") -> None:
        """Listen on the first free port from `port` on; port 0: any. RendezvousError if none of `PORTS` is free.

        variable: what names the port, for errors.
        """
        self.job = job
        self.connections: set[_Connection] = set()
        self._values: dict[str, bytes] = {}
        self._counters: dict[str, int] = {}
        self._bytes = 0
        self.pending_bytes = 0
        self._waiting: dict[str, set[_Connection]] = {}
        self._closed, self._close_lock = False, threading.Lock()
        allow_open_files(MAX_CONNECTIONS + MAX_UNAUTHENTICATED)
        # A name may resolve to loopback on this host and to a network address elsewhere: then listen on all addresses.
        bind_to = "127.0.0.1" if host == "localhost" else host if control_messages.is_loopback(host) else ""
        self._listener, self.port = _listen(bind_to, port, variable)
        self._loop, self._is_over = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="netfold store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End every connection. Waiting gets fail. Idempotent."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        self._loop.call_soon_threadsafe(self._is_over.set)
        self._thread.join()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        acceptor = Acceptor(self._greet, timeout_s=_HELLO_TIMEOUT_S)
        acceptor.start(self._listener)
        await self._is_over.wait()
        await acceptor.stop()
        self._listener.close()
        for connection in list(self.connections):
            connection.close()
        await asyncio.sleep(0)

    async def _greet(self, peer: Peer) -> None:
        """Serve a peer until it has said which job it is of; then the connection serves itself."""
        connection = _Connection(self, self._loop)
        await self._loop.connect_accepted_socket(lambda: connection, peer.stream)
        try:
            await connection.greeted
        except asyncio.CancelledError:
            connection.close()
            raise

    def reply(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """The reply; None for a `get` whose first key is not set. Raises as a malformed request makes it."""
        if request["type"] == "set":
            values = request["values"]
            if not isinstance(values, dict) or not all(isinstance(value, bytes) for value in values.values()):
                raise ValueError("a value is bytes")
            for key, value in values.items():
                before = len(self._values[key]) if key in self._values else -len(key) - ENTRY_BYTES
                self._grow(len(value) - before)
                self._values[key] = value
            for key in values:
                for connection in self._waiting.pop(key, ()):
                    connection.wake()
            return {"type": "ok", "value": None}
        if request["type"] == "add":
            key, amount = str(request["key"]), request["amount"]
            if not isinstance(amount, int) or abs(total := self._counters.get(key, 0) + amount) > MAX_COUNT:
                raise ValueError("an amount is a whole number, and a counter bounded")
            self._grow(0 if key in self._counters else len(key) + ENTRY_BYTES)
            self._counters[key] = total
            return {"type": "ok", "value": total}
        if request["type"] == "get":
            timeout_s = request["timeout_s"]
            if not isinstance(timeout_s, (int, float)) or not timeout_s <= threading.TIMEOUT_MAX:
                raise ValueError("a timeout is a number of seconds that can be waited for")
            found = self._first_values(request["keys"])
            return {"type": "ok", "value": found} if found else None
        raise ValueError(f"no request {request['type']!r}")

    def _first_values(self, keys: Any) -> list[bytes]:
        """Those of the first keys, as far as they are set and one message holds them, and of the first one."""
        if not isinstance(keys, list) or not 0 < len(keys) <= MAX_KEYS:
            raise ValueError(f"a request has 1 to {MAX_KEYS} keys")
        found: list[bytes] = []
        size_bytes = 0
        for key in keys:
            value = self._values.get(key)
            if value is None or (found and size_bytes + len(value) > MAX_REQUEST_BYTES):
                break
            found.append(value)
            size_bytes += len(value)
        return found

    def wait(self, connection: _Connection, key: str) -> None:
        """Call the connection's `wake` once the key is set."""
        self._waiting.setdefault(key, set()).add(connection)

    def forget(self, connection: _Connection, key: str) -> None:
        waiting = self._waiting.get(key)
        if waiting is not None:
            waiting.discard(connection)
            if not waiting:
                del self._waiting[key]

    def _grow(self, by: int) -> None:
        if self._bytes + by > MAX_BYTES:
            raise ValueError("the store is full")
        self._bytes += by


class _Connection(asyncio.Protocol):
    """A client's connection, for one request at a time: a client that does not await its reply is disconnected."""

    def __init__(self, server: TcpStoreServer, loop: asyncio.AbstractEventLoop) -> None:
        self._server, self._loop = server, loop
        self.greeted: asyncio.Future[None] = loop.create_future()  # done once the job is known, or at the end
        self._transport: Any = None
        self._received = bytearray()
        self._pending_bytes = 0  # in this connection's buffers
        self._knows_job = False
        self._get: dict[str, Any] | None = None  # that waits for its first key
        self._timer: asyncio.TimerHandle | None = None  # of that get

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        if len(self._server.connections) >= MAX_CONNECTIONS:
            return self.close()
        self._server.connections.add(self)

    def connection_lost(self, _: Exception | None) -> None:
        self._server.connections.discard(self)
        self._stop_waiting()
        self._received.clear()
        self._server.pending_bytes -= self._pending_bytes
        self._pending_bytes = 0
        if not self.greeted.done():
            self.greeted.set_result(None)

    def close(self) -> None:
        self._server.connections.discard(self)
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._received += data
        size_bytes = len(self._received)
        try:
            if self._get is not None or self._transport.get_write_buffer_size() > 0:
                raise ValueError("a request before the reply to the last one")
            message = control_messages.take(self._received)
            if message is not None:
                if self._received:
                    raise ValueError("two requests at once")
                self._handle(message)
            elif not self._knows_job and size_bytes > _MAX_HELLO_BYTES:
                raise ValueError("a long hello")
            self._count_pending(0 if message is not None and self._get is None else size_bytes)
        except (ValueError, KeyError, TypeError):
            self.close()  # not a client of this store

    def _count_pending(self, received_bytes: int) -> None:
        """Count what this connection has received and not answered, and what it has not sent; close it at the bound."""
        now_bytes = received_bytes + self._transport.get_write_buffer_size()
        self._server.pending_bytes += now_bytes - self._pending_bytes
        self._pending_bytes = now_bytes
        if now_bytes > 0 and self._server.pending_bytes > MAX_PENDING_BYTES:
            self.close()

    def _handle(self, message: dict[str, Any]) -> None:
        if not self._knows_job:
            if message["type"] != "hello" or message.get("job") != self._server.job:
                self._send({"type": "no", "reason": "this is the store of another job"})
                raise ValueError("no client of this job")
            self._knows_job = True
            self.greeted.set_result(None)
            return self._send({"type": "ok", "value": None})
        reply = self._server.reply(message)
        if reply is None and message["timeout_s"] > 0:
            self._get = message
            self._timer = self._loop.call_later(message["timeout_s"], self.wake)
            return self._server.wait(self, message["keys"][0])
        self._send(_NOT_SET if reply is None else reply)

    def wake(self) -> None:
        """Reply to the get that waits: its first key is set, or its time is over."""
        message = self._get
        self._stop_waiting()
        assert message is not None
        self._send(self._server.reply(message) or _NOT_SET)
        self._count_pending(0)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._get is not None:
            self._server.forget(self, self._get["keys"][0])
            self._get = None

    def _send(self, message: dict[str, Any]) -> None:
        self._transport.write(control_messages.encode(message))


class TcpStore:
    """A rank's end of a store that another process serves, or this one: a `Store`.

    Thread-safe: each request under way has its own connection, so a waiting `get` does not delay another thread's
    `set`.
    """

    def __init__(
        self, host: str, port: int, job: str, *, serve: bool, timeout_s: float, advice: str | None = None
    ) -> None:
        """Connect to this job's store on the first of `PORTS` ports from `port` on that has it. serve: at rank 0.

        advice: the end of errors, where the store is not rank 0's.
        Raises RendezvousError if there is none in time.
        """
        self._lock = threading.Lock()
        self._server = TcpStoreServer(host, port, job) if serve else None
        self._host, self._job, self._closed, self._advice = host, job, False, advice
        # All connections, and those that no request uses. As many as the most requests at once.
        self._streams: set[socket.socket] = set()
        self._idle: list[socket.socket] = []
        try:
            first = self._connect(port, time.monotonic() + timeout_seconds(timeout_s), timeout_s)
            self._port = int(first.getpeername()[1])
            self._idle.append(first)
        except BaseException:
            if self._server is not None:
                self._server.close()
            raise

    def set(self, key: str, value: bytes) -> None:
        self.set_all({key: value})

    def set_all(self, values: Mapping[str, bytes]) -> None:
        self._request({"type": "set", "values": dict(values)}, _GRACE_S)

    def get(self, key: str, timeout_s: float) -> bytes:
        return self.get_first([key], timeout_s)[0]

    def get_first(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        timeout_s = timeout_seconds(timeout_s)
        reply = self._request({"type": "get", "keys": list(keys), "timeout_s": timeout_s}, timeout_s + _GRACE_S)
        if reply["type"] != "ok":
            raise TimeoutError(f"{keys[0]} was not set within {timeout_s:.1f} s")
        return [bytes(each) for each in reply["value"]]

    def add(self, key: str, amount: int) -> int:
        return int(self._request({"type": "add", "key": key, "amount": amount}, _GRACE_S)["value"])

    def release(self) -> None:
        """Close the connections that no request uses. The next request makes one again."""
        with self._lock:
            idle, self._idle = self._idle, []
            self._streams.difference_update(idle)
        for stream in idle:
            stream.close()

    def close(self) -> None:
        """Close the connections; on rank 0 this ends the store. Idempotent."""
        with self._lock:
            self._closed = True
            streams = list(self._streams)
        for stream in streams:
            _shut(stream)
        if self._server is not None:
            self._server.close()

    def _request(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        stream: socket.socket | None = None
        try:
            stream = self._idle_connection()
            stream.settimeout(timeout_s)
            control_messages.send(stream, request)
            reply = control_messages.receive(stream)
            with self._lock:
                self._idle.append(stream)
            return reply
        except (EOFError, OSError) as error:
            if stream is not None:
                # A late reply would be taken for the reply to the next request.
                with self._lock:
                    self._streams.discard(stream)
                stream.close()
            raise RendezvousError(
                f"the store at {self._host} does not answer any more ({error}); {self._advice}"
                if self._advice
                else f"rank 0's store at {self._host} does not answer any more ({error}); did rank 0 end, or close its "
                "Communicator?",
                rank=None if self._advice else 0,
            ) from None

    def _idle_connection(self) -> socket.socket:
        """A connection that no request uses, a new one if need be. Raises OSError, EOFError."""
        with self._lock:
            if self._closed:
                raise OSError("it was closed")
            if self._idle:
                return self._idle.pop()
        return self._open(self._port, _GRACE_S)

    def _open(self, port: int, timeout_s: float) -> socket.socket:
        """A new connection to this job's store. OSError where another program, or another job's store, listens."""
        # The type stubs know a host only as text.
        stream = socket.create_connection((encoded(self._host), port), timeout=timeout_s)  # type: ignore[arg-type]
        with self._lock:
            self._streams.add(stream)
        try:
            control_messages.send(stream, {"type": "hello", "job": self._job})
            reply = control_messages.receive(stream)
            if reply["type"] != "ok":
                raise OSError(str(reply.get("reason")))
            return stream
        except BaseException:
            with self._lock:
                self._streams.discard(stream)
            stream.close()
            raise

    def _connect(self, port: int, deadline: float, timeout_s: float) -> socket.socket:
        ports = [self._server.port] if self._server is not None else range(port, port + PORTS)
        failure = "nobody listens"
        while time.monotonic() < deadline:
            for candidate in ports:
                try:
                    return self._open(candidate, min(max(0.05, deadline - time.monotonic()), _HELLO_TIMEOUT_S))
                except socket.gaierror as error:
                    raise RendezvousError(
                        f"{self._host!r} is no host that is known here ({error.strerror}); check MASTER_ADDR"
                    ) from None
                except ConnectionRefusedError:
                    continue
                except (EOFError, OSError, ValueError) as error:
                    failure = f"port {candidate}: {error}"
            time.sleep(_RETRY_S)
        raise RendezvousError(
            f"no store of this job at {self._host}, ports {port} to {port + PORTS - 1}, within {timeout_s:.1f} s "
            f"({failure}); "
            + (self._advice or "did rank 0 start, there, with the same MASTER_ADDR, MASTER_PORT and number of ranks?"),
            rank=None if self._advice else 0,
        )


def _listen(host: str, port: int, variable: str) -> tuple[socket.socket, int]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    error: OSError | None = None
    for candidate in range(port, port + PORTS) if port else (0,):
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, candidate))
            listener.listen(MAX_CONNECTIONS)
            listener.setblocking(False)
            return listener, listener.getsockname()[1]
        except OSError as refused:
            listener.close()
            error = refused
    raise RendezvousError(
        f"{'rank 0' if variable == 'MASTER_PORT' else 'this process'} cannot listen on {host or 'any address'}, ports "
        f"{port} to {port + PORTS - 1} ({error}); set another {variable}",
        rank=0,
    )


def _shut(stream: socket.socket) -> None:
    # close() alone would leave accept and recv of other threads waiting.
    with contextlib.suppress(OSError):
        stream.shutdown(socket.SHUT_RDWR)
    stream.close()
