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

from netfold.switch.metrics import CONTENT_TYPE, exposition
from netfold.switch_protocol import control_messages

# A request is a line and some headers; a slower or larger request is disconnected.
REQUEST_S = 5.0
MAX_REQUEST_BYTES = 8192
# Connections at once; one more is disconnected.
MAX_READERS = 32


class HttpServer:
    """Serve until `stop`.

    status: returns the current state of the switch as plain values.
    """

    def __init__(self, host: str, port: int, status: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        self._host, self._port, self._status = host, port, status
        self._server: asyncio.Server | None = None
        self._readers = 0

    async def start(self) -> str:
        """Bind and listen; return host:port. Raises OSError where the address is unavailable."""
        self._server = await asyncio.start_server(self._on_reader, self._host, self._port, limit=MAX_REQUEST_BYTES)
        bound: tuple[Any, ...] = self._server.sockets[0].getsockname()
        return control_messages.format_endpoint(bound[0], bound[1])

    def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _on_reader(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._readers += 1
        try:
            if self._readers <= MAX_READERS:
                await asyncio.wait_for(self._serve(reader, writer), REQUEST_S)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, asyncio.TimeoutError):
            pass
        finally:
            self._readers -= 1
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

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
