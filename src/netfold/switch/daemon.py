"""One switch: a listening socket, its jobs, and the native plane that adds for them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import ssl
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from netfold._native import auth, protocol
from netfold._native.dataplane import DataPlane
from netfold._native.transport import granted_receive_buffer
from netfold.switch.acceptor import Acceptor, Connection
from netfold.switch.admission import Admission, check_version
from netfold.switch.certificate import server_context
from netfold.switch.control_io import TIMEOUTS, abort, read, send, send_nowait
from netfold.switch.echo import open_echo
from netfold.switch.fabrics import Fabrics
from netfold.switch.job import Job, Member, RefusedError, labelled, listed
from netfold.switch.ledger import DEFAULT_TENANT, Ledger, retransmissions
from netfold.switch.log import event
from netfold.switch.parent import Link, Parent, ParentError
from netfold.switch.quota import Limits
from netfold.switch.stragglers import MAX_QUERIES, accept_reply, report_stragglers, requested_chunk
from netfold.switch.tokens import Tokens
from netfold.switch.tree import MAX_DEPTH
from netfold.switch_protocol import control_messages
from netfold.switch_protocol.data_path import MIN_WINDOW_CHUNKS, ReceiveBuffer, fabric_payload, window_chunks

MIN_PAYLOAD_BYTES = 512
# How often a switch that drains looks whether its jobs have ended.
_DRAIN_POLL_S = 0.1
# A complete leaf waits so much longer than its parent, which knows better who is absent.
_GRACE_S = 2.0


class Switch:
    """Serve until `stop`.

    tokens: who may join, over TLS with the certificate of `state_dir` (or one that lasts as long as the switch).
    Without, everybody who reaches it may, in the clear: on loopback, or where `open_to_all` is said. With tokens, data
    packets are authenticated too. parent: where sums of jobs go that have workers beyond this switch. threads: that
    handle packets, each those of jobs of its own; cores: one for each, that it stays on. busy_poll_s: how long they
    look for packets without sleep after the last one. fabrics: providers of libfabric over which packets may come,
    beside UDP. ValueError for what contradicts itself or cannot be had here, OSError where the certificate cannot be
    kept.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        limits: Limits | None = None,
        open_to_all: bool = False,
        tokens: Tokens | None = None,
        state_dir: Path | None = None,
        parent: Parent | None = None,
        threads: int = 1,
        cores: Sequence[int] = (),
        busy_poll_s: float = 0.0,
        fabrics: Sequence[str] = (),
    ) -> None:
        if tokens is not None and open_to_all:
            raise ValueError("--open turns tokens and TLS off, and --token-file asks for both: say one of the two")
        if tokens is None and state_dir is not None:
            raise ValueError("--state-dir keeps the certificate, which only a switch with --token-file has")
        if tokens is None and not open_to_all and not control_messages.is_loopback(host):
            raise ValueError(
                f"{host} is not a loopback address: anyone who reaches it could join. Name those who may with "
                "--token-file, say --open if every host on that network is trusted, or listen on 127.0.0.1"
            )
        if tokens is not None and auth.unavailable_reason():
            raise ValueError(
                f"--token-file: packets cannot be authenticated here: {auth.unavailable_reason()}. Without it only "
                f"--open, for a "
                "wire where every host is trusted, works"
            )
        self._tokens = tokens
        context: ssl.SSLContext | None = None
        self.fingerprint: str | None = None
        if tokens is not None:
            context, self.fingerprint = server_context(state_dir)
        self._fabrics = Fabrics(fabrics, host)
        self._acceptor = Acceptor(host, port, context, self._on_connection)
        tenants = [DEFAULT_TENANT] if tokens is None else tokens.tenants
        if cores and len(cores) != threads:
            raise ValueError(f"{threads} threads on {len(cores)} cores: name one core for each")
        self._planes = [DataPlane(core=core, busy_poll_s=busy_poll_s) for core in cores or [-1] * threads]
        limits = limits or Limits()
        self._ledger = Ledger(limits, tenants, self._planes)
        # Of the largest job; a smaller one is granted what it asks for, or as much.
        granted = granted_receive_buffer(2 * limits.window_bytes * limits.workers)
        self.buffer = ReceiveBuffer(granted, limits.window_bytes)
        self.incarnation = secrets.randbits(32)
        self._parent = parent
        self._admission = Admission(
            self._ledger, self.incarnation, tokens, parent, self._fabrics, tagged=self.authenticated, host=host
        )
        self._asking: asyncio.Task[control_messages.Message] | None = None  # the way up, for workers
        self._listens = (host, port)
        # An epoch is never given twice in an incarnation, not even to a job of the same name.
        self._next_epoch = 1
        self._tasks: set[asyncio.Task[Any]] = set()
        self._started_s = time.monotonic()

    @property
    def authenticated(self) -> bool:
        """Whether data packets carry tags."""
        return self._tokens is not None

    async def start(self) -> str:
        """Bind and listen; what workers take as NETFOLD_SWITCH. OSError where it cannot be."""
        self._listens = self._acceptor.start()
        endpoint = control_messages.format_endpoint(*self._listens)
        self._say_buffer()
        if self.fingerprint is None:
            what = f"no tokens and no TLS: whoever reaches {endpoint} may join, and packets are not authenticated"
            event(logging.WARNING, "open", what, address=endpoint)
            return endpoint
        return f"{endpoint}#{self.fingerprint}"

    def _say_buffer(self) -> None:
        """What the kernel grants, and what windows that makes."""
        most, window_bytes = self._ledger.limits.workers, self.buffer.window_bytes
        fields = {"granted_bytes": self.buffer.granted_bytes, "window_bytes": window_bytes}
        cut = self.buffer.window_shortfall(most)
        if not cut:
            what = f"the kernel holds the windows of {most} workers a job, {window_bytes} bytes each"
            event(logging.INFO, "buffer", what, **fields)
            return
        whole = max(workers for workers in range(most) if workers == 0 or not self.buffer.window_shortfall(workers))
        event(logging.INFO, "buffer", f"windows are whole for jobs of up to {whole} workers; {cut}", **fields)

    async def check_parent(self) -> None:
        """Look whether the parent is there, and say so in the log. ValueError where it is below this switch itself."""
        if self._parent is None:
            return
        where = self._parent.endpoint
        try:
            path = await self._parent.path([self.incarnation])
        except ParentError as error:
            if error.loop:
                raise ValueError(str(error)) from None
            event(logging.WARNING, "parent", f"{error}; until it is there jobs must end at this switch", parent=where)
            return
        levels = 1 + len(path["switches"])
        event(
            logging.INFO, "parent", f"below the switch at {where}, {levels} levels in all", parent=where, levels=levels
        )

    async def drain(self, reason: str, within_s: float) -> None:
        """Take no new job, end those that have not begun, and wait for the others to end, at most `within_s`."""
        self._ledger.draining = reason
        for job in [job for job in self._ledger.jobs.values() if not job.started]:
            await self._end(job, "draining", f"the switch is shutting down: {reason}")
        event(logging.INFO, "drain", f"draining after {reason}", jobs=len(self._ledger.jobs), within_s=within_s)
        deadline = time.monotonic() + within_s
        while self._ledger.jobs and time.monotonic() < deadline:
            await asyncio.sleep(_DRAIN_POLL_S)

    async def stop(self, reason: str) -> None:
        """Tell every worker, end every job, close the port."""
        for job in list(self._ledger.jobs.values()):
            await self._end(job, "draining", f"the switch is shutting down: {reason}")
        await self._acceptor.stop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def status(self) -> dict[str, Any]:
        """What there is to see from outside, as plain values; units are last in the names."""
        ledger = self._ledger
        # Each waits for one turn of its thread, which the daemon's loop must not do.
        readings = await asyncio.gather(*(asyncio.to_thread(plane.read) for plane in self._planes))
        counters = {job: counted for _, jobs in readings for job, counted in jobs.items()}
        jobs = list(ledger.jobs.values())
        parent = None
        if self._parent is not None:
            below = sum(job.link is not None for job in jobs)
            parent = {"endpoint": self._parent.endpoint, "jobs": below, "last_error": self._parent.last_error}
        return {
            "state": "draining" if ledger.draining else "serving",
            "uptime_s": time.monotonic() - self._started_s,
            "threads": len(self._planes),
            "cpu_s": sum(cpu_ns for cpu_ns, _ in readings) / 1e9,
            "incarnation": self.incarnation,
            "authenticated": self.authenticated,
            "fabrics": {each: sum(job.provider_below == each for job in jobs) for each in self._fabrics.providers},
            "connections": self._acceptor.connections,
            "unauthenticated_connections": self._acceptor.unauthenticated,
            "parent": parent,
            **ledger.status(counters),
        }

    async def _on_connection(self, connection: Connection) -> None:
        address = connection.address
        try:
            await self._serve(connection)
        except RefusedError as refusal:
            self._ledger.refusals[refusal.kind] += 1
            event(logging.WARNING, "refused", f"refused {address}: {refusal}", peer=address, reason=refusal.kind)
            loop = {"loop": True} if refusal.kind == "loop" else {}
            refused = {"type": "refused", "version": control_messages.VERSION, "reason": str(refusal), **loop}
            await send(connection.writer, refused)
        except (control_messages.ProtocolError, asyncio.IncompleteReadError, OSError, *TIMEOUTS) as error:
            what = f"dropped connection from {address} before it joined: {error or type(error).__name__}"
            event(logging.WARNING, "unauthenticated", what, peer=address)

    async def _serve(self, connection: Connection) -> None:
        reader, writer = connection.reader, connection.writer
        first = await read(reader)
        # Before its type, which another version may not have.
        check_version(first)
        if first["type"] == "path":
            await send(writer, await self._path(first))
            return
        if first["type"] == "quota":
            await self._serve_quota(first, connection)
            return
        try:
            job, member = self._admission.admit(first, writer, connection.address, self._opened)
        except (RefusedError, control_messages.ProtocolError) as refusal:
            # What the first of a job's ranks opened goes with it.
            opened = self._ledger.jobs.get(str(first.get("job")))
            if opened is not None and not opened.members and not opened.started:
                self._close(opened, str(refusal))
            raise
        what = f"job {job.name}: {member.who} of {len(job.ranks)} joined from {member.address}"
        event(logging.INFO, "joined", what, **job.log_fields, rank=labelled(member.ranks), peer=connection.address)
        connection.admitted()
        reason, fault, gone = "its connection was lost", None, ""
        try:
            number = job.position.children.index(member.child)
            admitted: control_messages.Message = {
                "type": "admitted",
                "version": control_messages.VERSION,
                "job_id": job.id,
                "incarnation": self.incarnation,
                "worker": number,
                "nonce": job.nonces[number],
                **job.data_address_of(number),
            }
            if job.secrets:
                admitted |= {"secret": job.secrets[number], "result_secret": job.result_secret}
                admitted["encrypt"] = job.encrypts
            await send(writer, admitted)
            while True:
                message = await read(reader)
                kind = message["type"]
                if kind == "ready":
                    await self._ready(job, member, message)
                elif kind == "stragglers":
                    self._on_stragglers(job, member, message)
                elif kind == "alive":
                    if "bytes_per_s" in message:
                        job.record_capacity(member, message["bytes_per_s"])
                    await self._tell(member, {"type": "alive", "serial": message.get("serial")})
                elif kind == "left" and member.child.switch is not None:
                    if message.get("rank") not in member.ranks:
                        raise control_messages.ProtocolError(
                            f"left of rank {message.get('rank')!r}, which is not below it"
                        )
                    await self._announce(job, message, member)
                elif kind == "leave":
                    reason, fault = str(message.get("reason", ""))[:512] or "it left", message.get("fault")
                    gone = str(message.get("switch", ""))
                    return
                else:
                    raise control_messages.ProtocolError(f"unknown message {kind!r}")
        except RefusedError:
            reason = "it was refused"
            raise
        except control_messages.ProtocolError as error:
            reason = f"it broke the control protocol: {error}"
            what = f"job {job.name}: {member.who}: {reason}"
            event(logging.WARNING, "protocol_error", what, **job.log_fields, rank=member.rank)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            await self._leave(job, member, reason, fault if isinstance(fault, int) else None, gone)

    async def _path(self, message: control_messages.Message) -> control_messages.Message:
        """What is above whoever asks: this switch, its parent, and so on."""
        self._admission.tenant(message)
        below = message.get("below")
        if not isinstance(below, list) or not all(isinstance(each, int) for each in below):
            raise control_messages.ProtocolError("path without the switches that ask")
        if self.incarnation in below:
            raise RefusedError(
                "loop", "the parents of these switches go in a circle, and this one is in it: look at each --parent"
            )
        if len(below) >= MAX_DEPTH:
            raise RefusedError("bound", f"a tree has at most {MAX_DEPTH} levels of switches")
        own = [self.incarnation, ""]
        answer: control_messages.Message = {"type": "path", "version": control_messages.VERSION}
        if self._parent is None:
            return {**answer, "switches": [own], "error": ""}
        try:
            if below:
                above = await self._parent.path([*below, self.incarnation])
            else:  # many workers ask at once, and hear one answer
                if self._asking is None or self._asking.done():
                    self._asking = self._spawn(self._parent.path([self.incarnation]))
                above = await asyncio.shield(self._asking)
        except ParentError as error:
            if error.loop:
                raise RefusedError("loop", str(error)) from None
            return {**answer, "switches": [own], "error": str(error)}
        (parent, _), *rest = above["switches"]
        switches = [own, [parent, self._parent.full_endpoint], *rest]
        return {**answer, "switches": switches, "error": above["error"]}

    async def _serve_quota(self, message: control_messages.Message, connection: Connection) -> None:
        room = self._quota(message)
        if message.get("udp") is not True:
            await send(connection.writer, room)
            return
        async with contextlib.AsyncExitStack() as stack:
            try:
                place = await stack.enter_async_context(open_echo(connection.writer))
            except OSError as error:
                host = connection.writer.get_extra_info("sockname")[0]
                raise RefusedError("port", f"the switch cannot open a data port on {host}: {error}") from None
            await send(connection.writer, {**room, "udp": place})
            with contextlib.suppress(OSError):
                await connection.reader.read(1)  # until it has what it wants, or has been a stranger for too long

    def _quota(self, message: control_messages.Message) -> control_messages.Message:
        """What whoever asks could have now: nothing is kept for it."""
        tenant = self._admission.tenant(message)
        if self._ledger.draining:
            raise RefusedError("draining", f"the switch is shutting down: {self._ledger.draining}")
        buffer = {"buffer_bytes": self.buffer.granted_bytes, "window_bytes": self.buffer.window_bytes}
        own = {"threads": len(self._planes), **buffer}
        return {"type": "quota", "version": control_messages.VERSION, **self._ledger.available(tenant), **own}

    def _opened(self, job: Job) -> None:
        """From now on it waits for its ranks, and for the parent's word."""
        loop = asyncio.get_running_loop()
        job.timer = loop.call_later(job.deadline, lambda: self._spawn(self._give_up(job)))
        if job.link is not None:
            job.parent_task = self._spawn(self._serve_parent(job, job.link))

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _serve_parent(self, job: Job, link: Link) -> None:
        """Be a worker of the parent for this job, to its end."""
        seconds = max(0.1, job.created + job.deadline - time.monotonic())
        lowest = min(worker for worker, path in enumerate(job.paths) if self.incarnation in path)
        join = {
            "job": job.name,
            "name": job.label,
            "rank": job.ranks[lowest],
            "ranks": list(job.ranks),
            "paths": job.paths,
            "switch": self.incarnation,
            "window_bytes": job.window_bytes,
            "timeout_s": seconds,
            "encrypt": job.encrypts,
        }
        reason, gone = "it closed the connection", link.parent.endpoint
        try:
            await link.join(join, self._listens, job.provider, seconds)
            job.plane.connect_parent(job.id, link.port)
            await self._advance(job)
            while True:
                told = await link.read()
                kind = told["type"]
                if kind == "start":
                    payload, window = int(told["payload_bytes"]), int(told["window"])
                    if (
                        job.started
                        or link.ready is None
                        or not all(0 < given <= said for given, said in zip((payload, window), link.ready, strict=True))
                    ):
                        raise control_messages.ProtocolError(f"start with window {window} x {payload} bytes")
                    await self._begin(job, payload, window, int(told["epoch"]))
                elif kind == "left":
                    if told.get("rank") not in job.ranks:
                        raise control_messages.ProtocolError(
                            f"left of rank {told.get('rank')!r}, which the job does not have"
                        )
                    await self._announce(job, told, None)
                elif kind == "stragglers":
                    self._on_stragglers(job, None, told)
                elif kind == "refused":
                    reason, gone = str(told.get("reason")), str(told.get("switch") or gone)
                    break
                else:
                    raise control_messages.ProtocolError(f"unknown message {kind!r}")
        except ParentError as error:
            await self._end(job, "parent", str(error))
            return
        except (asyncio.IncompleteReadError, OSError, ValueError, KeyError, TypeError) as error:
            if not isinstance(error, asyncio.IncompleteReadError):
                reason = str(error)
        if job.started:
            link.parent.last_error = f"the parent switch at {link.parent.endpoint} ended a job: {reason}"
            await self._end(job, "parent", reason, gone)
        else:
            await self._end(job, "parent", str(link.parent.error(f"refused: {reason}")))

    async def _give_up(self, job: Job) -> None:
        # What a leaf waits for it knows best, and has a deadline of its own.
        if any(member.child.switch is not None and member.payload_bytes == 0 for member in job.members.values()):
            await asyncio.sleep(_GRACE_S)
        if job.started or not self._ledger.holds(job):
            return
        absent = [
            rank
            for number, child in enumerate(job.position.children)
            if number not in job.members
            for rank in job.ranks_of(child)
        ]
        slow = [rank for member in job.members.values() if member.payload_bytes == 0 for rank in member.ranks]
        if absent:
            what = f"rank {listed(absent)} did not join"
        elif slow:
            what = f"rank {listed(slow)} did not get a packet through"
        else:
            assert job.link is not None, "a job without a parent starts when all are ready"
            await asyncio.sleep(_GRACE_S)
            what = f"the parent switch at {job.link.parent.endpoint} did not begin"
        await self._end(job, "absent", f"{what} within {job.deadline:.0f} s")

    async def _ready(self, job: Job, member: Member, message: control_messages.Message) -> None:
        payload = message.get("payload_bytes")
        if (
            not isinstance(payload, int)
            or payload % 8
            or not MIN_PAYLOAD_BYTES <= payload <= protocol.MAX_PAYLOAD_BYTES
        ):
            raise control_messages.ProtocolError(f"ready with payload_bytes {payload!r}")
        if job.fabric is not None and payload > fabric_payload(job.fabric["packet_bytes"]):
            raise control_messages.ProtocolError(f"ready with payload_bytes {payload}, more than its messages hold")
        if job.proofs and message.get("proof") != job.proofs[job.position.children.index(member.child)]:
            raise control_messages.ProtocolError("ready without the number that its hello came back with")
        window = message.get("window")
        if window is not None and (not isinstance(window, int) or window < MIN_WINDOW_CHUNKS):
            raise control_messages.ProtocolError(f"ready with window {window!r}")
        member.payload_bytes, member.window = payload, window
        await self._advance(job)

    async def _advance(self, job: Job) -> None:
        """Where all are ready: begin, or tell the parent so, with the window that there is memory for."""
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
            window = self._ledger.fitting_window(job, payload)
        except RefusedError as refusal:
            await self._end(job, refusal.kind, str(refusal))
            return
        # One line, one window: every switch of the tree grants the least of them.
        window = min([window, *(member.window for member in job.members.values() if member.window is not None)])
        if link is None:
            await self._begin(job, payload, window)
            return
        # Granted now, and not more later: the parent's word is at most this.
        self._ledger.grant(job, window, payload)
        link.ready = payload, window
        await link.send({"type": "ready", **link.ready_fields, "payload_bytes": payload, "window": window})

    async def _begin(self, job: Job, payload: int, window: int, parent_epoch: int = 0) -> None:
        self._ledger.grant(job, window, payload)
        epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        parent = None
        if job.link is not None:
            parent_job, incarnation, worker = job.link.identity
            parent = (parent_job, parent_epoch, incarnation, worker)
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
                names=[child.name for child in job.position.children],
                encrypts=job.encrypts,
            )
        except ValueError as error:
            await self._end(job, "absent", str(error))
            return
        self._ledger.started(job, epoch)
        if job.timer is not None:
            job.timer.cancel()
        what = (
            f"job {job.name}: epoch {epoch} starts with {job.size} workers, window {window} x {payload} bytes, "
            f"{job.memory_bytes / 2**20:.1f} MiB, "
            + (f"data port {job.port}" if job.fabric is None else f"over {job.over}")
            + f", packets {'encrypted' if job.encrypts else 'authenticated' if job.secrets else 'not authenticated'}"
            + ("" if job.link is None else f", below {job.link.parent.endpoint}")
        )
        event(
            logging.INFO,
            "started",
            what,
            **job.log_fields,
            epoch=epoch,
            workers=job.size,
            window=window,
            payload_bytes=payload,
            memory_bytes=job.memory_bytes,
            port=job.port,
            fabric=None if job.fabric is None else job.fabric["provider"],
            authenticated="yes" if job.secrets else "no",
            encrypted="yes" if job.encrypts else "no",
            parent=None if job.link is None else job.link.parent.endpoint,
        )
        cut = "" if job.buffer is None else job.buffer.window_shortfall(job.size, payload)
        if cut and window < window_chunks(job.window_bytes, payload):
            cut = ""  # memory, or another switch of the tree, has room for even less
        if cut:
            event(logging.WARNING, "buffer", f"job {job.name}: {cut}", **job.log_fields, window=window)
        start = control_messages.encode(
            {
                "type": "start",
                "epoch": epoch,
                "payload_bytes": payload,
                "window": window,
                **({"window_shortfall": cut} if cut else {}),
            }
        )
        # All at once: with a pause between them, one that starts and leaves at once would be told of before the start.
        for other in job.members.values():
            send_nowait(other.writer, start)

    def _on_stragglers(self, job: Job, member: Member | None, message: control_messages.Message) -> None:
        """A question, or an answer to one of ours; `member`: whose, None for the parent's."""
        if accept_reply(job, message):
            return
        asker = member if member is not None else job.link
        assert asker is not None, "whoever asks is a member, or the parent"
        if asker.open_queries == MAX_QUERIES:
            raise control_messages.ProtocolError(f"more than {MAX_QUERIES} questions at once")
        asker.open_queries += 1
        task = self._spawn(report_stragglers(job, member, requested_chunk(message), message.get("serial")))

        def answered(_: asyncio.Task[None]) -> None:
            asker.open_queries -= 1

        task.add_done_callback(answered)

    async def _leave(self, job: Job, member: Member, reason: str, fault: int | None, gone: str) -> None:
        number = job.position.children.index(member.child)
        if job.members.get(number) is not member:
            return
        del job.members[number]
        what = f"job {job.name}: {member.who} left: {reason}"
        event(logging.INFO, "left", what, **job.log_fields, rank=labelled(member.ranks))
        if not job.started:
            if self._ledger.holds(job):
                await self._end(job, "left", f"{member.who} left before the job started: {reason}")
            return
        if member.child.switch is None:
            message = {"type": "left", "rank": member.rank, "reason": reason, "fault": fault}
            await self._announce(job, message, member)
        elif not job.left.issuperset(member.ranks):
            # Those below have not gone: their switch has, and nobody adds for them any more.
            await self._end(job, "switch", reason, gone or member.address)
            return
        if not job.members and self._ledger.holds(job):
            self._close(job, "all below it left")

    async def _announce(self, job: Job, left: control_messages.Message, source: Member | None) -> None:
        """Tell all but who said so that a rank has left; `source`: None for the parent."""
        job.left.add(left["rank"])
        message = {key: left.get(key) for key in ("type", "rank", "reason", "fault")}
        if source is not None and job.link is not None:
            await job.link.send(message)
        for other in list(job.members.values()):
            if other is not source:
                await self._tell(other, message)

    async def _tell(self, member: Member, message: control_messages.Message) -> None:
        """Tell a member; one that does not read is disconnected, and its reader then ends its membership."""
        if not await send(member.writer, message):
            abort(member.writer)

    async def _end(self, job: Job, kind: str, reason: str, gone: str = "") -> None:
        """Refuse what is assembled so far, or end what is under way; everything is given back.

        gone: the address of the switch that is the reason, where it is not this one.
        """
        if not self._ledger.holds(job):
            return
        if not job.started:
            self._ledger.refusals[kind] += 1
        what = f"job {job.name} ends: " + (f"the switch at {gone} is gone: {reason}" if gone else reason)
        event(logging.WARNING, "ended", what, **job.log_fields, reason=kind)
        members = list(job.members.values())
        job.members.clear()
        switch = {"switch": gone} if gone else {}
        self._close(job, reason, **switch)
        for member in members:
            await send(member.writer, {"type": "refused", "reason": reason, **switch})
            member.writer.close()

    def _close(self, job: Job, reason: str, **more: str) -> None:
        """Give everything back; the parent hears `reason`, and more."""
        if job.timer is not None:
            job.timer.cancel()
        if job.link is not None:
            job.link.leave({"type": "leave", "reason": reason, **more})
        if job.parent_task is not None and job.parent_task is not asyncio.current_task():
            job.parent_task.cancel()
        counters = self._ledger.remove(job)
        if counters is None:
            return
        seconds = time.monotonic() - job.created
        drops = ", ".join(f"{count} {why}" for why, count in counters["drops"].items() if count) or "none"
        what = (
            f"job {job.name} closed after {seconds:.1f} s: {counters['results']} chunks from "
            f"{counters['contributions']} contributions, {counters['results_sent']} results "
            f"({counters['results_resent']} resent), dropped: {drops}"
        )
        if counters["send_errors"]:
            what += f"; send errors: {counters['send_errors']}, last: {counters['last_send_error']}"
        event(
            logging.INFO,
            "closed",
            what,
            **job.log_fields,
            seconds=seconds,
            result_bytes=counters["result_bytes"],
            contributions=counters["contributions"],
            retransmissions=retransmissions(counters),
            dropped=sum(counters["drops"].values()),
        )
