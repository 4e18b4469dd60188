"""Find the ranks that an operation waits for, for a worker or a neighbour in the tree.

A switch forwards the query to all its neighbours in the tree except the one that sent it. Where one of them does not
answer in time, and no straggler is found, the reply says `unknown`: there may be a straggler, and no rank is at fault.

All workers of a stalled job ask for the same chunk, each once per second. So what is found out about a chunk is used
for SHARED_S, and a neighbour gets a query per chunk in that time, however many workers ask.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Coroutine
from typing import Any

from netfold.switch.bmv2 import PipelineError
from netfold.switch.control_io import TIMEOUTS, abort, send
from netfold.switch.job import Job, Member
from netfold.switch.parent import Link
from netfold.switch_protocol import control_messages

# Open queries of one member, or of the parent; one more is a protocol error. A worker has two at most.
MAX_QUERIES = 8
# How long an answer is used for other queries about its chunk. A worker counts its switch as lost after 2.5 s.
SHARED_S = 0.2
# Timeout of a neighbour's reply; a worker waits 1 s for the whole tree.
_QUERY_TIMEOUT_S = 0.7
_TURN_S = 0.02


def accept_reply(job: Job, sender: Member | Link, message: control_messages.Message) -> bool:
    """Return whether `message` is a reply to a query of this switch; hand the reply to that query.

    Raises ProtocolError for a reply where `sender` has been asked nothing.
    """
    ranks, serial = message.get("ranks"), message.get("serial")
    if not isinstance(ranks, list) or not isinstance(serial, int):
        return False
    if sender.asked == 0:
        raise control_messages.ProtocolError("a reply that nobody asked for")
    sender.asked -= 1
    reply = job.pending_queries.get(serial)
    if reply is not None and not reply.done():
        known = [rank for rank in ranks[: job.position.workers] if type(rank) is int and rank >= 0]
        reply.set_result(None if message.get("unknown") else known)
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
    for number in await _shared(job, ("here", chunk), _missing(job, chunk)) or ():
        contributor, other = job.position.contributors[number], job.members.get(number)
        if contributor.switch is None:
            ranks.add(contributor.rank)
        elif other is not None and other is not member:
            queries.append(_shared(job, (number, chunk), _query(job, other, chunk)))
    if job.link is not None and member is not None:
        queries.append(_shared(job, ("parent", chunk), _query(job, job.link, chunk)))
    replies = await asyncio.gather(*queries)
    ranks.update(*(reply for reply in replies if reply is not None))
    message: control_messages.Message = {"type": "stragglers", "serial": serial, "ranks": sorted(ranks)}
    if not ranks and None in replies:
        message["unknown"] = True
    if member is not None:
        if not await send(member.writer, message):
            abort(member.writer)  # the member does not read; the end of its connection ends its membership
    elif job.link is not None:
        await job.link.send(message)


async def _shared(job: Job, key: Any, work: Coroutine[Any, Any, list[int] | None]) -> list[int] | None:
    """Return the result of `work`, or that of the same work where it began less than SHARED_S ago."""
    now = time.monotonic()
    for old in [each for each, (began, _) in job.shared_queries.items() if now - began >= SHARED_S]:
        del job.shared_queries[old]
    if key in job.shared_queries:
        work.close()
    else:
        job.shared_queries[key] = now, asyncio.ensure_future(work)
    result: list[int] | None = await asyncio.shield(job.shared_queries[key][1])
    return result


async def _missing(job: Job, chunk: int) -> list[int] | None:
    if job.pipeline is not None:
        try:
            return job.missing(chunk)
        except PipelineError:
            return None
    # Waits for one iteration of the data-plane thread, which must not block the daemon's loop. One at a time: a job's
    # queries must not fill the threads that the status and other jobs' queries use.
    async with job.lookup:
        return await asyncio.to_thread(job.missing, chunk)


async def _query(job: Job, other: Member | Link, chunk: int) -> list[int] | None:
    """The ranks that are missing beyond `other`; None where it does not know, or does not answer in time."""
    serial = secrets.randbits(63)
    reply: asyncio.Future[list[int] | None] = asyncio.get_running_loop().create_future()
    job.pending_queries[serial] = reply
    query: control_messages.Message = {"type": "stragglers", "chunk": chunk, "serial": serial}

    async def ask() -> list[int] | None:
        while other.asked >= MAX_QUERIES:
            await asyncio.sleep(_TURN_S)
        other.asked += 1
        await (other.send(query) if isinstance(other, Link) else send(other.writer, query))
        return await reply

    try:
        return await asyncio.wait_for(ask(), _QUERY_TIMEOUT_S)
    except TIMEOUTS:
        return None
    finally:
        del job.pending_queries[serial]
