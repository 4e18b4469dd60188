"""Accept connections to a switch: TLS, timeouts, and a bound on connections that are not authenticated.

A connection is unauthenticated until its job admits it. It costs a task and a socket for AUTHENTICATION_TIMEOUT_S at
most. At most MAX_UNAUTHENTICATED exist at once; one more closes the oldest. A worker is admitted within milliseconds,
so peers that connect and send nothing keep no worker out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from netfold.switch.control_io import abort, enable_keepalive
from netfold.switch.log import event
from netfold.switch_protocol import control_messages

MAX_UNAUTHENTICATED = 512
# From connecting to a join that was admitted.
AUTHENTICATION_TIMEOUT_S = 10.0
# Pause after the kernel refused a connection for lack of descriptors or memory.
_RETRY_S = 0.2


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
    """

    def __init__(
        self, host: str, port: int, context: ssl.SSLContext | None, serve: Callable[[Connection], Awaitable[None]]
    ) -> None:
        self._host, self._port, self._context, self._serve = host, port, context, serve
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()
        # In order of arrival: by task, its timeout and its address.
        self._unauthenticated: dict[asyncio.Task[None], tuple[asyncio.TimerHandle, str]] = {}

    @property
    def connections(self) -> int:
        return len(self._connections)

    @property
    def unauthenticated(self) -> int:
        return len(self._unauthenticated)

    def start(self) -> tuple[str, int]:
        """Bind and listen; return the bound host and port. Raises OSError where the address is unavailable."""
        family, _, _, _, address = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)[0]
        self._listener = socket.create_server(address[:2], family=family, backlog=1024)
        self._listener.setblocking(False)
        self._accepting = asyncio.ensure_future(self._accept(self._listener))
        bound: tuple[Any, ...] = self._listener.getsockname()
        return str(bound[0]), int(bound[1])

    async def stop(self) -> None:
        tasks = [*self._connections, *([self._accepting] if self._accepting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                stream, peer = await loop.sock_accept(listener)
            except OSError as error:
                event(logging.ERROR, "accept_failed", f"cannot take a connection: {error.strerror or error}")
                await asyncio.sleep(_RETRY_S)
                continue
            if len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
                oldest = next(iter(self._unauthenticated))
                self._end(oldest, "others came")
                # Wait until its descriptor is free: the backlog may hold a thousand more connections.
                await asyncio.wait([oldest], timeout=_RETRY_S)
            address = control_messages.format_endpoint(peer[0], peer[1])
            task = asyncio.ensure_future(self._run(stream, address))
            self._connections.add(task)
            timer = loop.call_later(
                AUTHENTICATION_TIMEOUT_S, self._end, task, f"{AUTHENTICATION_TIMEOUT_S:.0f} s were over"
            )
            self._unauthenticated[task] = timer, address
            task.add_done_callback(self._on_done)

    def _end(self, task: asyncio.Task[None], why: str) -> None:
        timer, address = self._unauthenticated.pop(task)
        timer.cancel()
        task.cancel()
        what = f"dropped connection from {address}: {why} before it joined"
        event(logging.WARNING, "unauthenticated", what, peer=address)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._connections.discard(task)
        self._on_admitted(task)

    def _on_admitted(self, task: asyncio.Task[None]) -> None:
        if task in self._unauthenticated:
            self._unauthenticated.pop(task)[0].cancel()

    async def _run(self, stream: socket.socket, address: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        enable_keepalive(stream)
        reader = asyncio.StreamReader(limit=control_messages.MAX_MESSAGE_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            # From here on the loop owns the socket, and closes it where the handshake fails.
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol,
                stream,
                ssl=self._context,
                ssl_handshake_timeout=None if self._context is None else AUTHENTICATION_TIMEOUT_S,
            )
        except OSError as error:  # ssl.SSLError is one
            what = f"dropped connection from {address}: no TLS ({error})"
            event(logging.WARNING, "unauthenticated", what, peer=address)
            return
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        try:
            await self._serve(Connection(reader, writer, address, lambda: self._on_admitted(task)))
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        finally:
            abort(writer)
