"""A switch sends nothing to an ended connection, without an error, over TCP and TLS."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

import pytest

from netfold.switch.certificate import server_context
from netfold.switch.control_io import PacedReader, abort, send

MESSAGE = {"type": "stragglers", "serial": 1, "ranks": [0]}


def close_twice(writer: asyncio.StreamWriter) -> None:
    """Close as the end of a job does, and then the end of its connection's task."""
    writer.close()
    writer.close()


@pytest.mark.parametrize("end", [close_twice, abort, asyncio.StreamWriter.close])
@pytest.mark.parametrize("secure", [False, True], ids=["clear", "tls"])
def test_a_reply_to_an_ended_connection_is_dropped(end: Callable[[asyncio.StreamWriter], None], secure: bool) -> None:
    async def converse() -> None:
        sent: asyncio.Future[tuple[bool, bool]] = asyncio.get_running_loop().create_future()

        async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                before = await send(writer, MESSAGE)
                end(writer)
                after = await send(writer, MESSAGE)
                abort(writer)
                sent.set_result((before, after))
            except BaseException as error:
                sent.set_exception(error)

        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server_context(None)[0] if secure else None)
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
        address = server.sockets[0].getsockname()
        reader, writer = await asyncio.open_connection(*address, ssl=client if secure else None)
        if end is not abort:  # which drops unsent messages
            assert await PacedReader(reader, asyncio.Lock()).read() == MESSAGE
        assert await asyncio.wait_for(sent, 20) == (True, False)
        abort(writer)
        server.close()

    asyncio.run(converse())
