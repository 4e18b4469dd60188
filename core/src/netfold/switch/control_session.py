"""Control connections, each from its first message to its end: a worker of a job, or a peer with one request."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from netfold.switch.acceptor import Connection
from netfold.switch.admission import Admission, check_version
from netfold.switch.bmv2 import Bmv2
from netfold.switch.control_io import TIMEOUTS, PacedReader, send
from netfold.switch.echo import open_echo
from netfold.switch.job import MAX_REASON, Departure, Job, Member, RefusedError, labelled, record_left
from netfold.switch.job_lifecycle import JobLifecycle
from netfold.switch.ledger import Ledger
from netfold.switch.log import event
from netfold.switch.root_path import RootPath
from netfold.switch.tree_session import TreeSession
from netfold.switch_protocol import control_messages
from netfold.switch_protocol.data_path import ReceiveBuffer


class ControlSessions:
    """Serve the control connections of one switch.

    buffer: the socket buffer that a job of this switch gets.
    listens: host and port of this switch.
    pipeline: reduces in place of the data planes; None where they do.
    """

    def __init__(
        self,
        admission: Admission,
        ledger: Ledger,
        jobs: JobLifecycle,
        root_path: RootPath,
        buffer: ReceiveBuffer,
        listens: tuple[str, int],
        pipeline: Bmv2 | None,
    ) -> None:
        self._admission, self._ledger, self._jobs, self._root_path = admission, ledger, jobs, root_path
        self._buffer = buffer
        self.listens = listens
        self._pipeline = pipeline
        self._gate = asyncio.Lock()

    async def serve(self, connection: Connection) -> None:
        """Serve a connection to its end; a refusal is counted, logged and sent."""
        address = connection.address
        try:
            await self._serve(connection)
        except RefusedError as refusal:
            self._ledger.refusals[refusal.kind] += 1
            event(logging.WARNING, "refused", f"refused {address}: {refusal}", peer=address, reason=refusal.kind)
            refused = {"type": "refused", "version": control_messages.VERSION, "reason": str(refusal)}
            if refusal.kind == "loop":
                refused["loop"] = True
            if refusal.remedy:
                refused["remedy"] = refusal.remedy
            await send(connection.writer, refused)
        except (control_messages.ProtocolError, asyncio.IncompleteReadError, OSError, *TIMEOUTS) as error:
            what = f"dropped connection from {address} before it joined: {error or type(error).__name__}"
            event(logging.WARNING, "unauthenticated", what, peer=address)

    async def _serve(self, connection: Connection) -> None:
        reader = PacedReader(connection.reader, self._gate)
        first = await reader.read()
        # The version comes before the type: another version may not have this type.
        check_version(first)
        if first["type"] == "path":
            self._admission.tenant(first)
            await send(connection.writer, await self._root_path.answer(first.get("below")))
        elif first["type"] == "quota":
            await self._serve_quota(connection, first)
        else:
            joined = self._join(connection, first)
            del first  # as long as the job's tree: 30 KB for each of 256 workers
            await self._serve_member(connection, reader, *joined)

    async def _serve_quota(self, connection: Connection, message: control_messages.Message) -> None:
        """Answer what the asking tenant could have at this moment; nothing is reserved."""
        tenant = self._admission.tenant(message)
        if self._ledger.draining:
            raise RefusedError("draining", f"the switch is shutting down: {self._ledger.draining}")
        quota = {
            "type": "quota",
            "version": control_messages.VERSION,
            **self._ledger.available(tenant),
            "threads": len(self._ledger.planes),
            "buffer_bytes": self._buffer.granted_bytes,
            "window_bytes": self._buffer.window_bytes,
        }
        if message.get("udp") is not True:
            await send(connection.writer, quota)
            return
        async with contextlib.AsyncExitStack() as stack:
            try:
                echo = await stack.enter_async_context(open_echo(connection.writer))
            except OSError as error:
                host = connection.writer.get_extra_info("sockname")[0]
                raise RefusedError("port", f"the switch cannot open a data port on {host}: {error}") from None
            await send(connection.writer, {**quota, "udp": echo})
            with contextlib.suppress(OSError):
                # The echo lasts until the peer closes the connection, or the acceptor's timeout cancels this task.
                await connection.reader.read(1)

    # --- a worker, or a switch below this one ---

    def _join(self, connection: Connection, message: control_messages.Message) -> tuple[Job, Member]:
        try:
            job, member = self._admission.admit(message, connection.writer, connection.address, self._on_opened)
        except (RefusedError, control_messages.ProtocolError) as refusal:
            # A job that this join opened ends with the refusal.
            opened = self._ledger.jobs.get(str(message.get("job")))
            if opened is not None and not opened.members and not opened.started:
                self._jobs.close(opened, str(refusal))
            raise
        what = f"job {job.title}: {member.who} of {job.position.workers} joined from {member.address}"
        rank = labelled(member.contributor)
        event(logging.INFO, "joined", what, **job.log_fields, rank=rank, peer=connection.address)
        connection.admitted()
        return job, member

    def _on_opened(self, job: Job) -> None:
        self._jobs.open(job)
        if job.link is not None:
            job.parent_task = self._jobs.spawn(TreeSession(job, job.link, self._jobs, self.listens).run())

    async def _serve_member(self, connection: Connection, reader: PacedReader, job: Job, member: Member) -> None:
        """Tell the member that it is admitted and handle its messages until it leaves."""
        reason = "its connection was lost"
        leave: control_messages.Message = {}
        try:
            await send(connection.writer, self._admitted(job, member))
            while (message := await reader.read())["type"] != "leave":
                await self._handle(job, member, message)
            leave = message
            reason = str(leave.get("reason", ""))[:MAX_REASON] or "it left"
        except RefusedError:
            reason = "it was refused"
            raise
        except control_messages.ProtocolError as error:
            reason = f"it broke the control protocol: {error}"
            what = f"job {job.title}: {member.who}: {reason}"
            event(logging.WARNING, "protocol_error", what, **job.log_fields, rank=member.rank)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            fault = leave.get("fault")
            fault = fault if isinstance(fault, int) else None
            await self._jobs.leave(job, member, reason, fault, str(leave.get("switch", "")))

    def _admitted(self, job: Job, member: Member) -> control_messages.Message:
        number = member.number
        admitted: control_messages.Message = {
            "type": "admitted",
            "version": control_messages.VERSION,
            "job_id": job.id,
            "incarnation": self._jobs.incarnation,
            "worker": number,
            "nonce": job.nonces[number],
            **job.data_address_of(number),
        }
        if job.secrets:
            admitted |= {"secret": job.secrets[number], "result_secret": job.result_secret, "encrypt": job.encrypts}
        if self._pipeline is not None:
            admitted |= {"profile": control_messages.HARDWARE, "payload_bytes": self._pipeline.payload_bytes}
        return admitted

    async def _handle(self, job: Job, member: Member, message: control_messages.Message) -> None:
        kind = message["type"]
        if kind == "ready":
            await self._jobs.ready(job, member, message)
        elif kind == "stragglers":
            self._jobs.handle_stragglers(job, member, message)
        elif kind == "alive":
            if "bytes_per_s" in message:
                job.record_capacity(member, message["bytes_per_s"])
            await self._jobs.send_or_abort(member, {"type": "alive", "serial": message.get("serial")})
        elif kind == "left" and member.is_switch:
            ranks = record_left(member.left, message, member.contributor.workers)
            self._jobs.announce_left(job, Departure.of(ranks, message, member))
        else:
            raise control_messages.ProtocolError(f"unknown message {kind!r}")
