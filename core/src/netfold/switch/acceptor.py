"""The ports of a switch: streams, with TLS where it has tokens, accepted as every listener of netfold accepts them.

switch_protocol/acceptor.py bounds the peers that are not authenticated.
"""

from __future__ import annotations

import asyncio
import asyncio.sslproto
import contextlib
import ctypes
import gc
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from netfold.switch.control_io import abort, enable_keepalive
from netfold.switch.log import event
from netfold.switch_protocol import acceptor, control_messages
from netfold.switch_protocol.acceptor import MAX_UNAUTHENTICATED, Peer

# Of each TLS connection, for received bytes. asyncio takes 256 KiB, which the heap does not give back once hundreds of
# connections have ended among others: a minute of TLS hellos left 800 MB. Control messages are short.
_TLS_BUFFER_BYTES = 16 << 10


# After the end of a connection, until the memory of all that have ended goes back to the kernel.
_RELEASE_S = 2.0


def bound_memory() -> None:
    """Bound what ended TLS connections hold. For a process that is a switch, once all it needs is imported.

    Connections end as cycles of references, so only the collector frees them. It comes late where many other objects
    live: those of now are left out from here on.
    """
    asyncio.sslproto.SSLProtocol.max_size = _TLS_BUFFER_BYTES
    gc.collect()
    gc.freeze()


def _release_memory() -> None:
    """Free ended connections, and give free pages back: among other blocks the C library keeps them."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # of glibc alone
        ctypes.CDLL(None).malloc_trim(0)


@dataclass
class Connection:
    """An accepted connection.

    admitted: call it once the peer is authenticated.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    address: str
    admitted: Callable[[], None]


class Acceptor:
    """Listen until `stop`.

    context: TLS; None for plain TCP.
    serve: handles one connection to its end.
    timeout_s: from a connection to `Connection.admitted`.
    limit: bytes that a peer can send ahead.
    what: what a peer had not done when it was dropped, for the log.
    """

    def __init__(
        self,
        host: str,
        port: int,
        context: ssl.SSLContext | None,
        serve: Callable[[Connection], Coroutine[Any, Any, None]],
        *,
        timeout_s: float,
        limit: int,
        most: int = MAX_UNAUTHENTICATED,
        what: str,
    ) -> None:
        self._host, self._port, self._context, self._serve = host, port, context, serve
        self._timeout_s, self._limit, self._what = timeout_s, limit, what
        self._listener: socket.socket | None = None
        self._release: asyncio.TimerHandle | None = None
        self._acceptor = acceptor.Acceptor(
            self._run, timeout_s=timeout_s, most=most, dropped=self._on_dropped, failed=_on_failed
        )

    @property
    def connections(self) -> int:
        return self._acceptor.connections

    @property
    def unauthenticated(self) -> int:
        return self._acceptor.unauthenticated

    def start(self) -> tuple[str, int]:
        """Bind and listen; return the bound host and port. Raises OSError where the address is unavailable."""
        family, _, _, _, address = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)[0]
        self._listener = socket.create_server(address[:2], family=family, backlog=1024)
        self._listener.setblocking(False)
        self._acceptor.start(self._listener)
        bound: tuple[Any, ...] = self._listener.getsockname()
        return str(bound[0]), int(bound[1])

    async def stop(self) -> None:
        await self._acceptor.stop()
        if self._release is not None:
            self._release.cancel()
        if self._listener is not None:
            self._listener.close()

    async def _run(self, peer: Peer) -> None:
        try:
            await self._run_connection(peer)
        finally:
            if self._release is None:
                self._release = asyncio.get_running_loop().call_later(_RELEASE_S, self._on_release)

    def _on_release(self) -> None:
        self._release = None
        _release_memory()

    async def _run_connection(self, peer: Peer) -> None:
        loop = asyncio.get_running_loop()
        address = control_messages.format_endpoint(peer.host, peer.port)
        enable_keepalive(peer.stream)
        reader = asyncio.StreamReader(limit=self._limit)
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            # From here on the loop owns the socket, and closes it where the handshake fails.
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol,
                peer.stream,
                ssl=self._context,
                ssl_handshake_timeout=None if self._context is None else self._timeout_s,
            )
        except OSError as error:  # ssl.SSLError is one
            _log_dropped(address, f"no TLS ({error})")
            return
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        try:
            await self._serve(Connection(reader, writer, address, peer.authenticated))
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        finally:
            abort(writer)

    def _on_dropped(self, peer: Peer, why: str) -> None:
        _log_dropped(control_messages.format_endpoint(peer.host, peer.port), f"{why} before it {self._what}")


def _log_dropped(address: str, why: str) -> None:
    event(logging.WARNING, "unauthenticated", f"dropped connection from {address}: {why}", peer=address)


def _on_failed(error: OSError) -> None:
    event(logging.ERROR, "accept_failed", f"cannot take a connection: {error.strerror or error}")
