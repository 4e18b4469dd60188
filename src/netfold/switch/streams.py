"""Control messages over asyncio's streams."""

from __future__ import annotations

import asyncio
import contextlib

from netfold import control

# For one who does not read.
TELL_S = 5.0
# Two types until Python 3.11, one since.
TIMEOUTS = (TimeoutError, asyncio.TimeoutError)


async def read(reader: asyncio.StreamReader) -> control.Message:
    """One message; asyncio.IncompleteReadError at the end, OSError, control.ProtocolError."""
    return control.decode(await reader.readexactly(control.length_of(await reader.readexactly(4))))


async def tell(writer: asyncio.StreamWriter, message: control.Message) -> None:
    """Send it, if it can be: who does not read is as good as gone, and whoever reads from them will notice."""
    with contextlib.suppress(OSError, RuntimeError, *TIMEOUTS):
        writer.write(control.encode(message))
        await asyncio.wait_for(writer.drain(), TELL_S)
