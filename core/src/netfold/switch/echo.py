"""A UDP echo port, by which a peer checks before a job whether UDP passes.

The port opens no job and reserves nothing; it lasts as long as the control connection that requested it. It echoes
only datagrams from the host at the other end of that connection that begin with the connection's nonce, MAX_REPLIES
times at most, so it sends nothing to a host that did not ask.
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
        self._replies_left = MAX_REPLIES
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)  # before Python 3.12 it is no subclass

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        if self._transport and self._replies_left and address[0] == self._peer and data.startswith(self._nonce):
            self._replies_left -= 1
            self._transport.sendto(data, address)


@contextlib.asynccontextmanager
async def open_echo(writer: asyncio.StreamWriter) -> AsyncIterator[control_messages.Message]:
    """Open the port on the local address of the connection; yield `port` and `nonce`. Raises OSError."""
    host, peer = writer.get_extra_info("sockname"), writer.get_extra_info("peername")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    loop = asyncio.get_running_loop()
    # An IPv6 socket address has a flow and a scope after its port.
    local = (host[0], 0, *host[2:])
    transport, _ = await loop.create_datagram_endpoint(lambda: _Echo(peer[0], nonce), local_addr=local)
    try:
        yield {"port": transport.get_extra_info("sockname")[1], "nonce": nonce}
    finally:
        transport.close()
