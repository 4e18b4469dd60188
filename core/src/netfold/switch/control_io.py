"""Control messages over asyncio streams."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time

from netfold.switch_protocol import control_messages

# Timeout of a send to a peer that does not read.
SEND_TIMEOUT_S = 5.0
# From the last packet of a lost host to the end of its connections.
KEEPALIVE_S = 18
# Two types before Python 3.11, one since.
TIMEOUTS = (TimeoutError, asyncio.TimeoutError)


class PacedReader:
    """Reads the messages of one peer: BURST at once, then RATE_PER_S, and one in an iteration of the event loop.

    A worker sends five messages a second at most. Whatever a peer sends, the other peers of the switch get their turn;
    its further messages wait in the buffers of its connection. A message counts once, and once more for each KiB.

    gate: shared by the peers. One of them decodes a long message in an iteration of the event loop: that takes 2 ms.
    """

    BURST = 128
    RATE_PER_S = 10.0
    LONG_BYTES = 2048

    def __init__(self, reader: asyncio.StreamReader, gate: asyncio.Lock) -> None:
        self._reader, self._gate = reader, gate
        self._left, self._refilled_s = float(self.BURST), time.monotonic()

    async def read(self) -> control_messages.Message:
        """Read one message. Raises asyncio.IncompleteReadError at the end, OSError, ProtocolError."""
        length = control_messages.length_of(await self._reader.readexactly(4))
        body = await self._reader.readexactly(length)
        now = time.monotonic()
        self._left = min(self.BURST, self._left + (now - self._refilled_s) * self.RATE_PER_S)
        self._refilled_s = now
        self._left -= 1 + length / 1024
        # `readexactly` lets no other task run where a message is in the buffer already.
        await asyncio.sleep(max(0.0, -self._left / self.RATE_PER_S))
        if length < self.LONG_BYTES:
            return control_messages.decode(body)
        async with self._gate:
            message = control_messages.decode(body)
            await asyncio.sleep(0)
            return message


async def send(writer: asyncio.StreamWriter, message: control_messages.Message) -> bool:
    """Send `message`; return False where the peer has not read for SEND_TIMEOUT_S, or is gone."""
    return await send_encoded(writer, control_messages.encode(message))


async def send_encoded(writer: asyncio.StreamWriter, encoded: bytes) -> bool:
    """As `send`, of encoded messages."""
    if not send_nowait(writer, encoded):
        return False
    with contextlib.suppress(OSError, RuntimeError, *TIMEOUTS):
        await asyncio.wait_for(writer.drain(), SEND_TIMEOUT_S)
        return True
    return False


def send_nowait(writer: asyncio.StreamWriter, encoded: bytes) -> bool:
    """Queue a message without waiting for the peer to read; return False where the connection has ended."""
    if writer.transport.is_closing():
        return False  # under TLS a write would raise AttributeError
    with contextlib.suppress(OSError, RuntimeError):
        writer.write(encoded)
        return True
    return False


def abort(writer: asyncio.StreamWriter) -> None:
    """End the connection at once and drop unsent messages; an ended connection stays ended."""
    # Python 3.11.2, which Debian 12 has, raises AttributeError for a TLS connection that has already ended.
    with contextlib.suppress(AttributeError):
        writer.transport.abort()


def enable_keepalive(stream: socket.socket) -> None:
    """Let the kernel end the connection KEEPALIVE_S after the other host stopped answering.

    A host that lost its power or its network sends no FIN. A process that is only stopped stays connected, because
    its kernel answers.
    """
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S // 2)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S // 6)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, KEEPALIVE_S * 1000)
