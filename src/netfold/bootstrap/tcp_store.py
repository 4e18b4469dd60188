"""A store that rank 0 or `netfold store` serves over TCP, for ranks that share no folder and have no torch.

Like torch's TCPStore it is plaintext and authenticates nobody: it protects the job's secret only from hosts that cannot
reach the port. (The standard library's managers unpickle what unauthenticated peers send; key-value stores on PyPI need
a server of their own.) Requests and replies are bounded messages of `netfold.switch_protocol.control_messages`.

    client -> server   hello  job             is this the store of my job?
                       set    key, value
                       get    key, timeout_s  waits at the server
                       add    key, amount
    server -> client   ok     value           a get's value, an add's new total
                       no     reason          then the connection ends, except after a get that timed out
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from typing import Any

from netfold.bootstrap.open_files import allow_open_files
from netfold.errors import RendezvousError
from netfold.switch_protocol import control_messages

# How many ports are tried from the given one on: another program, often torch's store, may use the first.
PORTS = 8
# Connections of one store, a thread each: one a rank, and one more for each concurrent request. More are closed.
MAX_CONNECTIONS = 8192
# All values together. An address and a job's description are below 1 KB per rank.
MAX_BYTES = 64 << 20
# Bound of a counter's absolute value: what control messages can carry.
MAX_COUNT = 1 << 62
# The job of a store of `netfold store`, which serves one run of one job and outlives its ranks.
OUTLIVING = "netfold store"
_RETRY_S = 0.05
_HELLO_TIMEOUT_S = 2.0
# The server replies to a get at its timeout; the client waits so much longer.
_GRACE_S = 5.0


_process_stores: dict[tuple[int, str, int, str, int], TcpStore] = {}
_process_lock = threading.Lock()


def process_store(host: str, port: int, job: str, *, rank: int, timeout_s: float) -> TcpStore:
    """This rank's store for as long as the process lives: all groups of a job use the same one.

    With one store a group, rank 0 would close it when another rank already uses it for the next group.
    """
    key = (os.getpid(), host, port, job, rank)
    with _process_lock:
        found = _process_stores.get(key)
    if found is None:
        made = TcpStore(host, port, job, serve=rank == 0, timeout_s=timeout_s)
        with _process_lock:
            found = _process_stores.setdefault(key, made)
    return found


def outliving_store(endpoint: str, timeout_s: float) -> TcpStore:
    """The store that `netfold store` serves. ValueError for no endpoint; RendezvousError where none answers in time."""
    host, port = control_messages.parse_endpoint(endpoint, what="NETFOLD_STORE")
    return TcpStore(host, port, OUTLIVING, serve=False, timeout_s=timeout_s, advice="does `netfold store` run there?")


class TcpStoreServer:
    """Serves until closed, with one thread a connection: threads are few and mostly sleep."""

    def __init__(self, host: str, port: int, job: str, *, variable: str = "MASTER_PORT") -> None:
        """variable: what names the port, for errors.

        Listen on the first free port from `port` on; port 0: any. RendezvousError if none of `PORTS` is free."""
        self._job = job
        self._values: dict[str, bytes] = {}
        self._counters: dict[str, int] = {}
        self._bytes = 0
        self._changed = threading.Condition()
        self._closed = False
        self._connections: set[socket.socket] = set()
        allow_open_files(MAX_CONNECTIONS)
        # A name may resolve to loopback on this host and to a network address elsewhere: then listen on all addresses.
        bind_to = "127.0.0.1" if host == "localhost" else host if control_messages.is_loopback(host) else ""
        self._listener, self.port = _listen(bind_to, port, variable)
        threading.Thread(target=self._accept, name="netfold store", daemon=True).start()

    def close(self) -> None:
        """End every connection. Waiting gets fail. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            connections = list(self._connections)
        _shut(self._listener)
        for stream in connections:
            _shut(stream)

    def _accept(self) -> None:
        while True:
            try:
                stream, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(_RETRY_S)  # out of descriptors: clients wait until some are free
                continue
            with self._changed:
                if self._closed or len(self._connections) >= MAX_CONNECTIONS:
                    stream.close()
                    continue
                self._connections.add(stream)
            threading.Thread(target=self._serve, args=(stream,), name="netfold store", daemon=True).start()

    def _serve(self, stream: socket.socket) -> None:
        try:
            # How long an unauthenticated peer that sends nothing occupies a thread.
            stream.settimeout(_HELLO_TIMEOUT_S)
            hello = control_messages.receive(stream)
            if hello["type"] != "hello" or hello.get("job") != self._job:
                return control_messages.send(stream, {"type": "no", "reason": "this is the store of another job"})
            control_messages.send(stream, {"type": "ok", "value": None})
            stream.settimeout(None)
            while True:
                control_messages.send(stream, self._reply(control_messages.receive(stream)))
        except (EOFError, OSError, ValueError, KeyError, TypeError):
            pass  # the client left, or is not a client of this store
        finally:
            with self._changed:
                self._connections.discard(stream)
            stream.close()

    def _reply(self, request: dict[str, Any]) -> dict[str, Any]:
        key = str(request["key"])
        with self._changed:
            if request["type"] == "set":
                value = request["value"]
                if not isinstance(value, bytes):
                    raise ValueError("a value is bytes")
                self._grow(len(value) - len(self._values[key]) if key in self._values else len(key) + len(value))
                self._values[key] = value
                self._changed.notify_all()
                return {"type": "ok", "value": None}
            if request["type"] == "add":
                amount = request["amount"]
                if not isinstance(amount, int) or abs(total := self._counters.get(key, 0) + amount) > MAX_COUNT:
                    raise ValueError("an amount is a whole number, and a counter bounded")
                self._grow(0 if key in self._counters else len(key))
                self._counters[key] = total
                return {"type": "ok", "value": total}
            if request["type"] == "get":
                timeout_s = request["timeout_s"]
                if not isinstance(timeout_s, (int, float)) or not timeout_s <= threading.TIMEOUT_MAX:
                    raise ValueError("a timeout is a number of seconds that can be waited for")
                self._changed.wait_for(lambda: self._closed or key in self._values, timeout_s)
                if key in self._values:
                    return {"type": "ok", "value": self._values[key]}
                return {"type": "no", "reason": "not set in time"}
        raise ValueError(f"no request {request['type']!r}")

    def _grow(self, by: int) -> None:
        if self._bytes + by > MAX_BYTES:
            raise ValueError("the store is full")
        self._bytes += by


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
            first = self._connect(port, time.monotonic() + timeout_s, timeout_s)
            self._port = int(first.getpeername()[1])
            self._idle.append(first)
        except BaseException:
            if self._server is not None:
                self._server.close()
            raise

    def set(self, key: str, value: bytes) -> None:
        self._request({"type": "set", "key": key, "value": value}, _GRACE_S)

    def get(self, key: str, timeout_s: float) -> bytes:
        reply = self._request({"type": "get", "key": key, "timeout_s": timeout_s}, timeout_s + _GRACE_S)
        if reply["type"] != "ok":
            raise TimeoutError(f"{key} was not set within {timeout_s:.1f} s")
        return bytes(reply["value"])

    def add(self, key: str, amount: int) -> int:
        return int(self._request({"type": "add", "key": key, "amount": amount}, _GRACE_S)["value"])

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
        stream = socket.create_connection((self._host, port), timeout=timeout_s)
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
