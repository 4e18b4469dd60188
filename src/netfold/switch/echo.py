"""Whether UDP passes, for whoever asks before a job: a port that sends back what it gets.

It opens no job and holds nothing: it is there as long as the connection over which it was asked for. It answers the
host at the other end of that connection alone, what begins with the number that went over it, as long as it came, and
MAX_REPLIES times at most: so nobody is sent what they did not ask for.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from typing import cast

from netfold.switch_protocol import control_messages

MAX_REPLIES = 16
_NONCE_BYTES = 16


class _Echo(asyncio.DatagramProtocol):
    def __init__(self, peer: str, nonce: bytes) -> None:
        self._peer, self._nonce = peer, nonce
        self._left = MAX_REPLIES
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)  # before Python 3.12 it is no subclass

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        if self._transport is None or address[0] != self._peer or not data.startswith(self._nonce) or not self._left:
            return
        self._left -= 1
        self._transport.sendto(data, address)


@contextlib.asynccontextmanager
async def open_echo(writer: asyncio.StreamWriter) -> AsyncIterator[control_messages.Message]:
    """The port, on the address that a connection came to, and the number; OSError where there is no port."""
    host, peer = writer.get_extra_info("sockname"), writer.get_extra_info("peername")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    loop = asyncio.get_running_loop()
    # An IPv6 address has a scope behind its port.
    place = (host[0], 0, *host[2:])
    transport, _ = await loop.create_datagram_endpoint(lambda: _Echo(peer[0], nonce), local_addr=place)
    try:
        yield {"port": transport.get_extra_info("sockname")[1], "nonce": nonce}
    finally:
        transport.close()
