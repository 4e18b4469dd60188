"""Control messages over asyncio's streams."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from netfold.switch_protocol import control_messages

# For one who does not read.
SEND_TIMEOUT_S = 5.0
# From the last sign of a host to the end of its connections.
KEEPALIVE_S = 18
# Two types until Python 3.11, one since.
TIMEOUTS = (TimeoutError, asyncio.TimeoutError)


async def read(reader: asyncio.StreamReader) -> control_messages.Message:
    """One message; asyncio.IncompleteReadError at the end, OSError, control.ProtocolError."""
    return control_messages.decode(await reader.readexactly(control_messages.length_of(await reader.readexactly(4))))


async def send(writer: asyncio.StreamWriter, message: control_messages.Message) -> bool:
    """Send it; False where the other end has not read for SEND_TIMEOUT_S, or is gone."""
    if not send_nowait(writer, control_messages.encode(message)):
        return False
    with contextlib.suppress(OSError, RuntimeError, *TIMEOUTS):
        await asyncio.wait_for(writer.drain(), SEND_TIMEOUT_S)
        return True
    return False


def send_nowait(writer: asyncio.StreamWriter, encoded: bytes) -> bool:
    """Hand over a message, without waiting for the other end to read; False where the connection has ended."""
    if writer.transport.is_closing():
        return False  # under TLS a write would raise AttributeError
    with contextlib.suppress(OSError, RuntimeError):
        writer.write(encoded)
        return True
    return False


def abort(writer: asyncio.StreamWriter) -> None:
    """End the connection at once, with what was not sent yet; again where it has ended."""
    # Python 3.11.2, Debian 12's, raises AttributeError for a connection under TLS that is gone already.
    with contextlib.suppress(AttributeError):
        writer.transport.abort()


def enable_keepalive(stream: socket.socket) -> None:
    """Let the kernel end a connection whose other host no longer answers: after KEEPALIVE_S, whoever waits there.

    A host that lost its power or its network sends no FIN. A process that is only stopped stays connected: its kernel
    answers.
    """
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S // 2)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S // 6)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, KEEPALIVE_S * 1000)
