"""Find the ranks that an operation waits for, for a worker or a neighbour in the tree.

A switch forwards the query to all its neighbours in the tree except the one that sent it.
"""

from __future__ import annotations

import asyncio
import secrets

from netfold.switch.control_io import TIMEOUTS, abort, send
from netfold.switch.job import Job, Member
from netfold.switch.parent import Link
from netfold.switch_protocol import control_messages

# Open queries of one member, or of the parent; one more is a protocol error. A worker has two at most.
MAX_QUERIES = 8
# Timeout of a neighbour's reply; a worker waits 1 s for the whole tree.
_QUERY_TIMEOUT_S = 0.7


def accept_reply(job: Job, message: control_messages.Message) -> bool:
    """Return whether `message` is a reply to a query of this switch; hand the reply to that query."""
    ranks, serial = message.get("ranks"), message.get("serial")
    if not isinstance(ranks, list) or not isinstance(serial, int):
        return False
    reply = job.pending_queries.get(serial)
    if reply is not None and not reply.done():
        reply.set_result([rank for rank in ranks if rank in job.ranks])
    return True


def requested_chunk(message: control_messages.Message) -> int:
    """Return the chunk that a query names. Raises ProtocolError where it names none."""
    chunk = message.get("chunk")
    if not isinstance(chunk, int) or not 0 <= chunk < 1 << 64:
        raise control_messages.ProtocolError("stragglers without a chunk")
    return chunk


async def report_stragglers(job: Job, member: Member | None, chunk: int, serial: object) -> None:
    """Send the missing ranks of `chunk` to `member`, or to the parent for None.

    A missing child switch counts as the ranks that it waits for itself.
    """
    ranks: set[int] = set()
    queries = []
    # Waits for one iteration of the data-plane thread, which must not block the daemon's loop.
    for number in await asyncio.to_thread(job.plane.missing, job.id, chunk):
        child, other = job.position.children[number], job.members.get(number)
        if child.switch is None:
            ranks.update(job.ranks_of(child))
        elif other is not None and other is not member:
            queries.append(_query(job, other, chunk))
    if job.link is not None and member is not None:
        queries.append(_query(job, job.link, chunk))
    for reply in await asyncio.gather(*queries):
        ranks.update(reply)
    message: control_messages.Message = {"type": "stragglers", "serial": serial, "ranks": sorted(ranks)}
    if member is not None:
        if not await send(member.writer, message):
            abort(member.writer)  # the member does not read; the end of its connection ends its membership
    elif job.link is not None:
        await job.link.send(message)


async def _query(job: Job, other: Member | Link, chunk: int) -> list[int]:
    serial = secrets.randbits(63)
    reply = job.pending_queries[serial] = asyncio.get_running_loop().create_future()
    query: control_messages.Message = {"type": "stragglers", "chunk": chunk, "serial": serial}
    try:
        await (other.send(query) if isinstance(other, Link) else send(other.writer, query))
        return await asyncio.wait_for(reply, _QUERY_TIMEOUT_S)
    except TIMEOUTS:
        return []
    finally:
        del job.pending_queries[serial]
