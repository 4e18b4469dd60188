"""Who an operation waits for: asked by a worker, or by a neighbour in the tree, and asked on away from who asks."""

from __future__ import annotations

import asyncio
import secrets

from netfold.switch.control_io import TIMEOUTS, abort, send
from netfold.switch.job import Job, Member
from netfold.switch.parent import Link
from netfold.switch_protocol import control_messages

# Open questions of one member, or of the parent; one more breaks the protocol. A worker has two at most.
MAX_QUERIES = 8
# For a neighbour in the tree to say who it waits for; workers give the whole tree a second.
_ASK_S = 0.7


def accept_reply(job: Job, message: control_messages.Message) -> bool:
    """Whether `message` is an answer to a question of ours; if so it goes to who asked."""
    ranks, serial = message.get("ranks"), message.get("serial")
    if not isinstance(ranks, list) or not isinstance(serial, int):
        return False
    answer = job.pending_queries.get(serial)
    if answer is not None and not answer.done():
        answer.set_result([rank for rank in ranks if rank in job.ranks])
    return True


def requested_chunk(message: control_messages.Message) -> int:
    """What is asked about; ProtocolError where that is nothing."""
    chunk = message.get("chunk")
    if not isinstance(chunk, int) or not 0 <= chunk < 1 << 64:
        raise control_messages.ProtocolError("stragglers without a chunk")
    return chunk


async def report_stragglers(job: Job, member: Member | None, chunk: int, serial: object) -> None:
    """Tell `member`, or the parent for None: those that this switch waits for; of switches, who they wait for."""
    ranks: set[int] = set()
    asks = []
    # Waits for one turn of the data thread, which the daemon's loop must not do.
    for number in await asyncio.to_thread(job.plane.missing, job.id, chunk):
        child, other = job.position.children[number], job.members.get(number)
        if child.switch is None:
            ranks.update(job.ranks_of(child))
        elif other is not None and other is not member:
            asks.append(_ask(job, other, chunk))
    if job.link is not None and member is not None:
        asks.append(_ask(job, job.link, chunk))
    for answer in await asyncio.gather(*asks):
        ranks.update(answer)
    said: control_messages.Message = {"type": "stragglers", "serial": serial, "ranks": sorted(ranks)}
    if member is not None:
        if not await send(member.writer, said):
            abort(member.writer)  # it does not read: its reader ends its membership
    elif job.link is not None:
        await job.link.send(said)


async def _ask(job: Job, other: Member | Link, chunk: int) -> list[int]:
    serial = secrets.randbits(63)
    answer = job.pending_queries[serial] = asyncio.get_running_loop().create_future()
    question: control_messages.Message = {"type": "stragglers", "chunk": chunk, "serial": serial}
    try:
        await (other.send(question) if isinstance(other, Link) else send(other.writer, question))
        return await asyncio.wait_for(answer, _ASK_S)
    except TIMEOUTS:
        return []
    finally:
        del job.pending_queries[serial]
