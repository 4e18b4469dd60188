"""A job from its assembly to its end: who is ready, when it starts, who left, and why it ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from netfold._native import protocol
from netfold.switch.bmv2 import MAX_WINDOW, Bmv2, PipelineError, PipelineJob, PipelineMember, PipelineParent
from netfold.switch.control_io import abort, send, send_encoded, send_nowait
from netfold.switch.job import Departure, Job, Member, RefusedError, described, labelled
from netfold.switch.ledger import Ledger, retransmissions
from netfold.switch.log import event
from netfold.switch.stragglers import MAX_QUERIES, accept_reply, report_stragglers, requested_chunk
from netfold.switch_protocol import control_messages
from netfold.switch_protocol.data_path import MIN_WINDOW_CHUNKS, fabric_payload, window_chunks

MIN_PAYLOAD_BYTES = 512
# Ranks that leave within this time are announced together. All ranks of a job leave at its end, and a message from each
# of them to each of the others would be millions.
_ANNOUNCE_S = 0.05
# A complete leaf waits this much longer than its parent, because the parent knows better who is absent.
_GRACE_S = 2.0


class JobLifecycle:
    """The changes of state of all jobs of one switch.

    incarnation: the switch's id, new with each start of the process.
    pipeline: reduces in place of the data planes; None where they do.
    host: where workers send packets to the pipeline.
    tasks: the background tasks of jobs; they end with their job, or when `stop` cancels them.
    """

    def __init__(self, ledger: Ledger, incarnation: int, pipeline: Bmv2 | None, host: str) -> None:
        self.incarnation = incarnation
        self.tasks: set[asyncio.Task[Any]] = set()
        self._ledger = ledger
        self._pipeline, self._host = pipeline, host
        # An incarnation never gives an epoch twice, not even to a job of the same name.
        self._next_epoch = 1

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def stop(self) -> None:
        """Cancel all background tasks and wait for their end."""
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    # --- assembly ---

    def open(self, job: Job) -> None:
        """Start the assembly timer of a new job."""
        job.timer = asyncio.get_running_loop().call_later(job.deadline, lambda: self.spawn(self._give_up(job)))

    async def _give_up(self, job: Job) -> None:
        """End a job that is not complete at its deadline, and name the absent or slow ranks."""
        # A leaf that is not ready has its own deadline and knows better who is absent below it.
        if any(member.is_switch and member.payload_bytes == 0 for member in job.members.values()):
            await asyncio.sleep(_GRACE_S)
        if job.started or not self._ledger.holds(job):
            return
        contributors = job.position.contributors
        absent = [each for number, each in enumerate(contributors) if number not in job.members]
        slow = [contributors[number] for number, member in sorted(job.members.items()) if member.payload_bytes == 0]
        if absent:
            what = f"{described(absent)} did not join"
        elif slow:
            what = f"{described(slow)} did not get a packet through"
        else:
            assert job.link is not None, "a job without a parent starts when all are ready"
            await asyncio.sleep(_GRACE_S)
            what = f"the parent switch at {job.link.parent.endpoint} did not begin"
        await self.end(job, "absent", f"{what} within {job.deadline:.0f} s")

    async def ready(self, job: Job, member: Member, message: control_messages.Message) -> None:
        """Record the payload and window that `member` found on its data path; begin when all members are ready."""
        payload = message.get("payload_bytes")
        # A pipeline fixes the length, and may have a short one.
        hardware = member.is_switch and message.get("profile") == control_messages.HARDWARE
        least = 8 if hardware else MIN_PAYLOAD_BYTES
        if self._pipeline is not None:
            least = self._pipeline.payload_bytes
            if payload != least:
                raise control_messages.ProtocolError(f"ready with payload_bytes {payload!r}, and not {least}")
        if not isinstance(payload, int) or payload % 8 or not least <= payload <= protocol.MAX_PAYLOAD_BYTES:
            raise control_messages.ProtocolError(f"ready with payload_bytes {payload!r}")
        if job.fabric is not None and payload > fabric_payload(job.fabric["packet_bytes"]):
            raise control_messages.ProtocolError(f"ready with payload_bytes {payload}, more than its messages hold")
        if job.proofs and message.get("proof") != job.proofs[member.number]:
            raise control_messages.ProtocolError("ready without the number that its hello came back with")
        window = message.get("window")
        if window is not None and (not isinstance(window, int) or window < MIN_WINDOW_CHUNKS):
            raise control_messages.ProtocolError(f"ready with window {window!r}")
        member.payload_bytes, member.window, member.hardware = payload, window, hardware
        await self.begin_when_ready(job)

    async def begin_when_ready(self, job: Job) -> None:
        """Begin at the root, below it tell the parent, once all members and the path to the parent are ready."""
        if job.started or len(job.members) < job.size or any(m.payload_bytes == 0 for m in job.members.values()):
            return
        payloads = [member.payload_bytes for member in job.members.values()]
        link = job.link
        if link is not None:
            if link.ready is not None or link.payload_bytes == 0:
                return
            payloads.append(link.payload_bytes)
        payload = min(payloads)
        try:
            job.hardware = self._fixes_payload(job, payload)
            window = self._ledger.fitting_window(job, payload)
        except RefusedError as refusal:
            await self.end(job, refusal.kind, str(refusal))
            return
        if self._pipeline is not None:
            window = min(window, MAX_WINDOW)
        # All switches of a tree use one window: the smallest that any of them can grant.
        window = min([window, *(member.window for member in job.members.values() if member.window is not None)])
        if link is None:
            await self.begin(job, payload, window)
            return
        # Grant the memory before the offer: the parent starts the job with at most this window and payload.
        self._ledger.grant(job, window, payload)
        link.ready = payload, window
        ready = {"type": "ready", **link.ready_fields, "payload_bytes": payload, "window": window}
        await link.send({**ready, "profile": control_messages.HARDWARE} if job.hardware else ready)

    def _fixes_payload(self, job: Job, payload: int) -> bool:
        """Whether a pipeline here, above or below fixes the length of the job's packets.

        payload: the longest that passes between this switch and all its neighbours.
        Raises RefusedError where the pipelines have another length.
        """
        lengths = {member.payload_bytes for member in job.members.values() if member.hardware}
        if self._pipeline is not None:
            lengths.add(self._pipeline.payload_bytes)
        if job.link is not None and job.link.hardware:
            lengths.add(job.link.payload_bytes)
        if lengths - {payload}:
            raise RefusedError(
                "profile",
                "the P4 pipelines of this job's tree have packets of "
                f"{' and '.join(map(str, sorted(lengths)))} bytes of values, and {payload} bytes pass on all paths: "
                "compile them with one NETFOLD_VALUES, which the MTU of every path holds",
            )
        return bool(lengths)

    async def begin(self, job: Job, payload: int, window: int, parent_epoch: int = 0) -> None:
        """Start a new epoch of `job` in the data plane and tell all members.

        parent_epoch: the epoch that the parent gave; 0 at the root.
        """
        self._ledger.grant(job, window, payload)
        epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        parent = None
        if job.link is not None:
            parent_job, incarnation, worker = job.link.identity
            parent = (parent_job, parent_epoch, incarnation, worker)
        if job.hardware:
            for member in job.members.values():
                if not member.speaks_hardware:
                    what = "a switch of this job's tree is a P4 pipeline with the hardware profile, and "
                    what += f"{member.who} does not speak it: update netfold there"
                    await self.end(job, "profile", what)
                    return
        if self._pipeline is not None:
            try:
                self._install(self._pipeline, job, epoch, window, parent_epoch)
            except PipelineError as error:
                await self.end(job, "pipeline", str(error))
                return
            self._tell_start(job, epoch, payload, window)
            return
        try:
            job.plane.begin(
                job=job.id,
                epoch=epoch,
                incarnation=self.incarnation,
                workers=job.size,
                window=window,
                payload_bytes=payload,
                keys=job.keys(epoch),
                parent=parent,
                parent_keys=None if job.link is None else job.link.keys(parent_epoch),
                names=[each.worker for each in job.position.contributors],
                encrypts=job.encrypts,
            )
        except ValueError as error:
            await self.end(job, "absent", str(error))
            return
        self._tell_start(job, epoch, payload, window)

    def _install(self, pipeline: Bmv2, job: Job, epoch: int, window: int, parent_epoch: int) -> None:
        """Let the pipeline reduce for `job`. Raises PipelineError."""
        assert job.port is not None, "a pipeline's jobs have a UDP port"
        members = [
            PipelineMember(*member.udp, job.position.contributors[number].worker)
            for number, member in sorted(job.members.items())
            if member.udp is not None
        ]
        parent = None
        if job.link is not None:
            parent_job, incarnation, worker = job.link.identity
            own_ip, own_port, ip, port = job.link.addresses
            parent = PipelineParent(parent_job, parent_epoch, incarnation, worker, ip, port, own_ip, own_port)
        # In the daemon's loop, for 20 to 50 ms: no member may leave before the job has begun.
        pipeline.install(PipelineJob(job.id, epoch, self._host, job.port, window, members, parent))
        job.pipeline = pipeline

    def _tell_start(self, job: Job, epoch: int, payload: int, window: int) -> None:
        """Tell all members that the job has begun in the data plane."""
        self._ledger.started(job, epoch)
        if job.timer is not None:
            job.timer.cancel()
        _log_start(job, payload, window)
        shortfall = _window_shortfall(job, payload, window)
        if shortfall:
            event(logging.WARNING, "buffer", f"job {job.title}: {shortfall}", **job.log_fields, window=window)
        start: control_messages.Message = {"type": "start", "epoch": epoch, "payload_bytes": payload, "window": window}
        if shortfall:
            start["window_shortfall"] = shortfall
        if job.hardware:
            start["profile"] = control_messages.HARDWARE
        encoded = control_messages.encode(start)
        # Without an await in between: a member that starts and leaves at once must not be announced before the start.
        for member in job.members.values():
            send_nowait(member.writer, encoded)

    # --- while the job runs ---

    def handle_stragglers(self, job: Job, member: Member | None, message: control_messages.Message) -> None:
        """Answer a `stragglers` query, or take a reply to one of this switch's queries.

        member: the sender; None for the parent.
        """
        sender = member if member is not None else job.link
        assert sender is not None, "a query comes from a member or from the parent"
        if accept_reply(job, sender, message):
            return
        if sender.open_queries == MAX_QUERIES:
            raise control_messages.ProtocolError(f"more than {MAX_QUERIES} questions at once")
        sender.open_queries += 1
        task = self.spawn(report_stragglers(job, member, requested_chunk(message), message.get("serial")))

        def on_answered(_: asyncio.Task[None]) -> None:
            sender.open_queries -= 1

        task.add_done_callback(on_answered)

    async def send_or_abort(self, member: Member, message: control_messages.Message) -> None:
        """Send to `member`; disconnect a member that does not read, so that its reader ends its membership."""
        if not await send(member.writer, message):
            abort(member.writer)

    def announce_left(self, job: Job, departure: Departure) -> None:
        """Tell all members and the parent, except the source, that ranks have left; after _ANNOUNCE_S."""
        if not job.departures:
            self.spawn(self._announce(job))
        job.departures.append(departure)

    async def _announce(self, job: Job) -> None:
        await asyncio.sleep(_ANNOUNCE_S)
        if not self._ledger.holds(job):
            return
        left, job.departures = _left_messages(job.departures), []
        encoded = [(source, control_messages.encode(message)) for source, message in left]
        if job.link is not None and (to_parent := b"".join(each for source, each in encoded if source is not None)):
            await job.link.send_encoded(to_parent)
        sources = {id(source) for source, _ in left}
        to_all = b"".join(each for _, each in encoded)

        async def tell(member: Member) -> None:
            own = id(member) in sources
            messages = b"".join(each for source, each in encoded if source is not member) if own else to_all
            if messages and not await send_encoded(member.writer, messages):
                abort(member.writer)

        await asyncio.gather(*map(tell, list(job.members.values())))

    async def leave(self, job: Job, member: Member, reason: str, fault: int | None, gone: str) -> None:
        """End a membership: announce the rank, or end the job where it cannot go on.

        fault: the rank that the leaving rank blames.
        gone: the address of the switch that the leaving switch blames; "" for none.
        """
        if job.members.get(member.number) is not member:
            return
        del job.members[member.number]
        what = f"job {job.title}: {member.who} left: {reason}"
        event(logging.INFO, "left", what, **job.log_fields, rank=labelled(member.contributor))
        if not job.started:
            if self._ledger.holds(job):
                await self.end(job, "left", f"{member.who} left before the job started: {reason}")
            return
        if not member.is_switch:
            self.announce_left(job, Departure((member.rank,), reason, fault, member))
        elif len(member.left) < member.contributor.workers:
            # Ranks below the lost switch are still there, and no switch reduces for them any more.
            await self.end(job, "switch", reason, gone or member.address)
            return
        if not job.members and self._ledger.holds(job):
            self.close(job, "all below it left")

    # --- the end ---

    async def end(self, job: Job, kind: str, reason: str, gone: str = "") -> None:
        """Refuse a job that is being assembled, or end a running one; release everything and tell the members.

        gone: the address of the switch that is the reason; "" for this switch.
        """
        if not self._ledger.holds(job):
            return
        if not job.started:
            self._ledger.refusals[kind] += 1
        what = f"job {job.title} ends: " + (f"the switch at {gone} is gone: {reason}" if gone else reason)
        event(logging.WARNING, "ended", what, **job.log_fields, reason=kind)
        members = list(job.members.values())
        job.members.clear()
        switch = {"switch": gone} if gone else {}
        self.close(job, reason, **switch)
        for member in members:
            await send(member.writer, {"type": "refused", "reason": reason, **switch})
            member.writer.close()

    def close(self, job: Job, reason: str, **more: str) -> None:
        """Release everything that `job` holds; the parent gets `reason` and `more` in a `leave` message."""
        if job.timer is not None:
            job.timer.cancel()
        if job.link is not None:
            # The parent takes a switch for lost that leaves before all ranks below it have left.
            left = [message for source, message in _left_messages(job.departures) if source is not None]
            job.link.leave([*left, {"type": "leave", "reason": reason, **more}])
        if job.parent_task is not None and job.parent_task is not asyncio.current_task():
            job.parent_task.cancel()
        counters = self._ledger.remove(job)
        if counters is None:
            return
        age_s = time.monotonic() - job.created
        drops = ", ".join(f"{count} {why}" for why, count in counters["drops"].items() if count) or "none"
        what = (
            f"job {job.title} closed after {age_s:.1f} s: {counters['results']} chunks from "
            f"{counters['contributions']} contributions, dropped: {drops}"
        )
        if counters["send_errors"]:
            what += f"; send errors: {counters['send_errors']}, last: {counters['last_send_error']}"
        event(
            logging.INFO,
            "closed",
            what,
            **job.log_fields,
            seconds=age_s,
            result_bytes=counters["result_bytes"],
            contributions=counters["contributions"],
            retransmissions=retransmissions(counters),
            dropped=sum(counters["drops"].values()),
        )


def _left_messages(departures: Sequence[Departure]) -> list[tuple[Member | None, control_messages.Message]]:
    """`left` messages with their sources. Ranks of one source's subtree with the same reason share a message."""
    ranks: dict[Any, list[int]] = {}
    sources: dict[Any, Member | None] = {}
    for each in departures:
        # A rank that left gets no messages any more, so it needs no message without itself.
        reported_by = each.source if each.source is not None and each.source.is_switch else None
        key = each.reason, each.fault, each.source is None, id(reported_by)
        sources.setdefault(key, each.source)
        ranks.setdefault(key, []).extend(each.ranks)
    return [(sources[key], {"type": "left", "ranks": ranks[key], "reason": key[0], "fault": key[1]}) for key in ranks]


def _log_start(job: Job, payload: int, window: int) -> None:
    parent = None if job.link is None else job.link.parent.endpoint
    event(
        logging.INFO,
        "started",
        f"job {job.title}: epoch {job.epoch} starts with {job.size} workers",
        **job.log_fields,
        epoch=job.epoch,
        workers=job.size,
        window=window,
        payload_bytes=payload,
        memory_bytes=job.memory_bytes,
        port=job.port,
        fabric=None if job.fabric is None else job.fabric["provider"],
        authenticated="yes" if job.secrets else "no",
        encrypted="yes" if job.encrypts else "no",
        parent=parent,
    )


def _window_shortfall(job: Job, payload: int, window: int) -> str:
    """Say why the socket buffer cuts the window; "" where it does not, or where another bound is lower."""
    if job.buffer is None or window < window_chunks(job.window_bytes, payload):
        return ""
    return job.buffer.window_shortfall(job.size, payload)
