"""The switch's second port: /metrics, /healthz and /status over HTTP, read-only.

The server runs on the daemon's event loop, which owns everything that it shows, so reading needs no lock. It speaks
plain HTTP without authentication, as scrapers expect. On a network address it shows the names, sizes and traffic of
all jobs to everyone who reaches it. Nothing there lets a reader join a job or inject packets.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

from netfold.switch.acceptor import Acceptor, Connection
from netfold.switch.metrics import CONTENT_TYPE, exposition
from netfold.switch_protocol import control_messages

# From a connection to the end of its page, whatever its reader does; a slower reader is disconnected.
REQUEST_S = 5.0
# A request is a line and some headers; a larger request is disconnected.
MAX_REQUEST_BYTES = 8192
# Connections at once. One more disconnects the oldest, so idle readers keep no health check out.
MAX_READERS = 32


class HttpServer:
    """Serve until `stop`.

    status: returns the current state of the switch as plain values.
    """

    def __init__(self, host: str, port: int, status: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        self._status = status
        # A reader never becomes authenticated: the bound and the time are those of unauthenticated peers.
        self._acceptor = Acceptor(
            host,
            port,
            None,
            self._on_reader,
            timeout_s=REQUEST_S,
            limit=MAX_REQUEST_BYTES,
            most=MAX_READERS,
            what="had read a page of the metrics",
        )

    async def start(self) -> str:
        """Bind and listen; return host:port. Raises OSError where the address is unavailable."""
        return control_messages.format_endpoint(*self._acceptor.start())

    async def stop(self) -> None:
        await self._acceptor.stop()

    async def _on_reader(self, connection: Connection) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            await self._serve(connection.reader, connection.writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        method, target = (request[0], request[1].partition("?")[0]) if len(request) == 3 else ("", "")
        code, kind, body = await self._answer(method, target)
        head = f"HTTP/1.1 {code}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + (b"" if method == "HEAD" else body))
        await writer.drain()

    async def _answer(self, method: str, target: str) -> tuple[str, str, bytes]:
        text = "text/plain; charset=utf-8"
        if method not in ("GET", "HEAD"):
            return "405 Method Not Allowed", text, b"GET /metrics, /healthz or /status\n"
        if target == "/metrics":
            return "200 OK", CONTENT_TYPE, exposition(await self._status())
        if target == "/status":
            return "200 OK", "application/json", json.dumps(await self._status()).encode() + b"\n"
        if target == "/healthz":
            # `status` waits for the threads that handle packets, so this page checks them too.
            return "200 OK", text, f"{(await self._status())['state']}\n".encode()
        return "404 Not Found", text, b"pages: /metrics, /healthz and /status\n"
