"""One switch: a listening socket, its jobs, and the native plane that adds for them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import ssl
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from netfold import control, packet_keys
from netfold._native import protocol, seal
from netfold._native.aggregator import Plane
from netfold.switch.certificate import server_context
from netfold.switch.entrance import Entrance, Guest
from netfold.switch.facts import say
from netfold.switch.parts import Limits, Part, fitting_window, part_of
from netfold.switch.tokens import Tenant, Tokens

# Longest that a job waits for its ranks, whatever a worker asks for.
MAX_ASSEMBLY_S = 600.0
# Fewer chunks in flight than this and a round trip is mostly waiting.
MIN_WINDOW_CHUNKS = 8
MIN_PAYLOAD_BYTES = 512
MAX_JOB_NAME = 128
# What people call a job: a label in metrics and a word in the log.
_LABEL = re.compile(r"[\w.:/+-]{0,64}", re.ASCII)
# How often a switch that drains looks whether its jobs have ended.
_DRAIN_POLL_S = 0.1
# Counters that stay when their job has ended.
_TOTALS = ("result_bytes", "results", "contributions", "answers_sent", "answers_again")
# The tenant of a switch without tokens.
EVERYBODY = Tenant("everybody")
# Two types until Python 3.11, one since.
_TIMEOUTS = (TimeoutError, asyncio.TimeoutError)


@dataclass
class _Member:
    rank: int
    writer: asyncio.StreamWriter
    address: str
    payload_bytes: int = 0


@dataclass
class _Job:
    name: str  # a digest that only its ranks know
    label: str
    tenant: Tenant
    id: int
    ranks: tuple[int, ...]  # what its workers, by number, are called
    host: str
    port: int
    nonces: list[int]
    secrets: list[bytes]  # of workers, by number; empty where packets carry no tags
    answer_secret: bytes
    window_bytes: int
    deadline: float
    created: float
    members: dict[int, _Member] = field(default_factory=dict)
    started: bool = False
    epoch: int = 0
    memory_bytes: int = 0
    slots: int = 0
    timer: asyncio.TimerHandle | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def who(self) -> dict[str, object]:
        """Its fields in the log."""
        return {"job": self.name, "name": self.label or None, "tenant": self.tenant.name, "id": f"{self.id:08x}"}


class _RefusedError(Exception):
    """Said to the worker in its words; `kind` is the reason in one, for counting."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class Switch:
    """Serve until `stop`.

    tokens: who may join, over TLS with the certificate of `state_dir` (or one that lasts as long as the switch).
    Without, everybody who reaches it may, in the clear: on loopback, or where `open_to_all` is said. With tokens, data
    packets are authenticated too. ValueError for what contradicts itself or cannot be had here, OSError where the
    certificate cannot be kept.
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
    ) -> None:
        if tokens is not None and open_to_all:
            raise ValueError("--open turns tokens and TLS off, and --token-file asks for both: say one of the two")
        if tokens is None and state_dir is not None:
            raise ValueError("--state-dir keeps the certificate, which only a switch with --token-file has")
        if tokens is None and not open_to_all and not control.is_loopback(host):
            raise ValueError(
                f"{host} is not a loopback address: anyone who reaches it could join. Name those who may with "
                "--token-file, say --open if every host on that network is trusted, or listen on 127.0.0.1"
            )
        if tokens is not None and seal.missing():
            raise ValueError(
                f"--token-file: packets cannot be authenticated here: {seal.missing()}. Without it only --open, for a "
                "wire where every host is trusted, works"
            )
        self._tokens = tokens
        context: ssl.SSLContext | None = None
        self.fingerprint: str | None = None
        if tokens is not None:
            context, self.fingerprint = server_context(state_dir)
        self._entrance = Entrance(host, port, context, self._on_guest)
        self.limits = limits or Limits()
        tenants = [EVERYBODY] if tokens is None else tokens.tenants
        self._parts = {tenant: part_of(tenant, tenants, self.limits) for tenant in tenants}
        self.incarnation = secrets.randbits(32)
        self._plane = Plane()
        self._jobs: dict[str, _Job] = {}
        self._ids: set[int] = set()
        self._memory_bytes = 0
        # An epoch is never given twice in an incarnation, not even to a job of the same name.
        self._next_epoch = 1
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = ""
        self._started_s = time.monotonic()
        self._jobs_started = 0
        self._refusals: Counter[str] = Counter()
        # What jobs did that have ended.
        self._ended: Counter[str] = Counter()
        self._ended_drops: Counter[str] = Counter()

    @property
    def authenticated(self) -> bool:
        """Whether data packets carry tags."""
        return self._tokens is not None

    async def start(self) -> str:
        """Bind and listen; what workers take as NETFOLD_SWITCH. OSError where it cannot be."""
        endpoint = control.format_endpoint(*self._entrance.start())
        if self.fingerprint is None:
            what = f"no tokens and no TLS: whoever reaches {endpoint} may join, and packets are not authenticated"
            say(logging.WARNING, "open", what, address=endpoint)
            return endpoint
        return f"{endpoint}#{self.fingerprint}"

    async def drain(self, reason: str, within_s: float) -> None:
        """Take no new job, end those that have not begun, and wait for the others to end, at most `within_s`."""
        self._draining = reason
        for job in [job for job in self._jobs.values() if not job.started]:
            await self._end(job, "draining", f"the switch is shutting down: {reason}")
        say(logging.INFO, "drain", f"draining after {reason}", jobs=len(self._jobs), within_s=within_s)
        deadline = time.monotonic() + within_s
        while self._jobs and time.monotonic() < deadline:
            await asyncio.sleep(_DRAIN_POLL_S)

    async def stop(self, reason: str) -> None:
        """Tell every worker, end every job, close the port."""
        for job in list(self._jobs.values()):
            await self._end(job, "draining", f"the switch is shutting down: {reason}")
        await self._entrance.stop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def status(self) -> dict[str, Any]:
        """What there is to see from outside, as plain values; units are last in the names."""
        jobs = [self._job_status(job) for job in self._jobs.values()]
        drops = self._ended_drops.copy()
        totals = self._ended.copy()
        for counters in (job["counters"] for job in jobs):
            drops.update(counters["drops"])
            totals.update({name: counters[name] for name in _TOTALS})
        return {
            "state": "draining" if self._draining else "serving",
            "uptime_s": time.monotonic() - self._started_s,
            "cpu_s": self._plane.cpu_ns() / 1e9,
            "incarnation": self.incarnation,
            "authenticated": self.authenticated,
            "connections": self._entrance.connections,
            "strangers": self._entrance.strangers,
            "memory_granted_bytes": self._memory_bytes,
            "memory_free_bytes": self.limits.memory_bytes - self._memory_bytes,
            "jobs_limit": self.limits.jobs,
            "jobs_started": self._jobs_started,
            "refusals": dict(self._refusals),
            "totals": {**{name: totals[name] for name in _TOTALS}, "drops": dict(drops)},
            "tenants": [self._tenant_status(tenant, part) for tenant, part in self._parts.items()],
            "jobs": jobs,
        }

    def _tenant_status(self, tenant: Tenant, part: Part) -> dict[str, Any]:
        own = self._jobs_of(tenant)
        granted_bytes = sum(job.memory_bytes for job in own)
        return {
            "name": tenant.name,
            "jobs": len(own),
            "memory_granted_bytes": granted_bytes,
            "memory_free_bytes": part.memory_bytes - granted_bytes,
        }

    def _job_status(self, job: _Job) -> dict[str, Any]:
        counters = self._plane.counters(job.id)
        assert counters is not None, "a job is there as long as its data port"
        lags = zip(job.ranks, counters["arrivals"], counters["arrival_lag_ns"], counters["last_arrivals"], strict=True)
        return {
            "id": f"{job.id:08x}",
            "name": job.label,
            "tenant": job.tenant.name,
            "state": "running" if job.started else "assembling",
            "size": job.size,
            "joined": len(job.members),
            "epoch": job.epoch,
            "port": job.port,
            "age_s": time.monotonic() - job.created,
            "memory_bytes": job.memory_bytes,
            "retransmissions": _retransmissions(counters),
            "counters": counters,
            "ranks": [
                {"rank": rank, "arrivals": arrivals, "lag_s": lag_ns / 1e9, "last": last}
                for rank, arrivals, lag_ns, last in lags
            ],
        }

    async def _on_guest(self, guest: Guest) -> None:
        address = guest.address
        try:
            await self._serve(guest)
        except _RefusedError as refusal:
            self._refusals[refusal.kind] += 1
            say(logging.WARNING, "refused", f"refused {address}: {refusal}", peer=address, reason=refusal.kind)
            await _tell(guest.writer, {"type": "refused", "reason": str(refusal)})
        except (control.ProtocolError, asyncio.IncompleteReadError, OSError, *_TIMEOUTS) as error:
            what = f"dropped connection from {address} before it joined: {error or type(error).__name__}"
            say(logging.WARNING, "stranger", what, peer=address)

    async def _serve(self, guest: Guest) -> None:
        reader, writer = guest.reader, guest.writer
        job, member = self._admit(await _read(reader), writer, guest.address)
        guest.admitted()
        reason, fault = "its connection was lost", None
        try:
            worker = job.ranks.index(member.rank)
            admitted: control.Message = {
                "type": "admitted",
                "job_id": job.id,
                "incarnation": self.incarnation,
                "worker": worker,
                "nonce": job.nonces[worker],
                "port": job.port,
            }
            if job.secrets:
                admitted |= {"secret": job.secrets[worker], "answer_secret": job.answer_secret}
            await _tell(writer, admitted)
            while True:
                message = await _read(reader)
                kind = message["type"]
                if kind == "ready":
                    await self._ready(job, member, message)
                elif kind == "missing":
                    await self._missing(job, member, message)
                elif kind == "leave":
                    reason, fault = str(message.get("reason", ""))[:512] or "it left", message.get("fault")
                    return
                else:
                    raise control.ProtocolError(f"unknown message {kind!r}")
        except _RefusedError:
            reason = "it was refused"
            raise
        except control.ProtocolError as error:
            reason = f"it broke the control protocol: {error}"
            what = f"job {job.name}: rank {member.rank}: {reason}"
            say(logging.WARNING, "protocol_error", what, **job.who, rank=member.rank)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            await self._leave(job, member, reason, fault if isinstance(fault, int) else None)

    def _admit(self, message: control.Message, writer: asyncio.StreamWriter, address: str) -> tuple[_Job, _Member]:
        if message["type"] != "join":
            raise control.ProtocolError(f"expected join, not {message['type']!r}")
        if message.get("version") != control.VERSION:
            raise _RefusedError(
                "version",
                f"this switch speaks control protocol {control.VERSION}, the worker {message.get('version')}: "
                "run the same netfold on both sides",
            )
        tenant = self._tenant(message)
        name, label = message.get("job"), message.get("name", "")
        rank, ranks, port = message.get("rank"), _ranks(message), message.get("port")
        if not isinstance(name, str) or not 0 < len(name) <= MAX_JOB_NAME:
            raise control.ProtocolError("join without a job name")
        if not isinstance(label, str) or not _LABEL.fullmatch(label):
            raise control.ProtocolError(f"join of a job that is called {str(label)[:80]!r}")
        if rank not in ranks:
            raise control.ProtocolError(f"join as rank {rank!r}, which is not one of the job's {len(ranks)}")
        if not isinstance(port, int) or not 0 < port < 1 << 16:
            raise control.ProtocolError(f"join with the port {port!r}")
        if not tenant.may_call(label):
            raise _RefusedError(
                "name",
                f"{tenant.name}'s jobs are called {' or '.join(tenant.names)}, not {label!r} (NETFOLD_JOB_NAME)",
            )
        job = self._jobs.get(name)
        if job is None:
            job = self._open(name, label, tenant, ranks, message, writer)
        if job.tenant != tenant:
            raise _RefusedError("token", "this job belongs to another token: all its ranks need the same")
        if job.size != len(ranks):
            raise _RefusedError(
                "mismatch", f"rank {rank} says that its job has {len(ranks)} ranks; others said {job.size}"
            )
        if job.ranks != ranks:
            raise _RefusedError(
                "mismatch",
                f"rank {rank} says that the ranks of its job are {_list(ranks)}; others said other ones",
            )
        if rank in job.members:
            raise _RefusedError(
                "duplicate",
                f"rank {rank} of this job has joined before, from {job.members[rank].address}: two processes were "
                "started with the same rank",
            )
        if job.started:
            raise _RefusedError("under way", "this job is under way; a restarted worker must come with a new group")
        # Its packets will come from where it speaks now, and from no other host.
        self._plane.expect(job.id, ranks.index(rank), writer.get_extra_info("peername")[0], port)
        member = job.members[rank] = _Member(rank, writer, address)
        what = f"job {name}: rank {rank} of {job.size} joined from {address}"
        say(logging.INFO, "joined", what, **job.who, rank=rank, peer=address)
        return job, member

    def _jobs_of(self, tenant: Tenant) -> list[_Job]:
        return [job for job in self._jobs.values() if job.tenant == tenant]

    def _tenant(self, message: control.Message) -> Tenant:
        if self._tokens is None:
            return EVERYBODY
        token = message.get("token")
        if not isinstance(token, str):
            raise _RefusedError("token", "this switch wants a token, and none came: set NETFOLD_TOKEN_FILE")
        tenant = self._tokens.find(token)
        if tenant is None:
            raise _RefusedError("token", "the token of NETFOLD_TOKEN_FILE is not known here")
        return tenant

    def _open(
        self,
        name: str,
        label: str,
        tenant: Tenant,
        ranks: tuple[int, ...],
        message: control.Message,
        writer: asyncio.StreamWriter,
    ) -> _Job:
        size = len(ranks)
        if self._draining:
            raise _RefusedError("draining", f"the switch is shutting down: {self._draining}")
        part, own = self._parts[tenant], self._jobs_of(tenant)
        if len(own) >= part.jobs:
            raise _RefusedError("full", f"this switch is full: it serves {part.jobs} jobs (--max-jobs){_for(tenant)}")
        if sum(job.size for job in own) + size > part.connections:
            raise _RefusedError("full", f"this switch is full: it serves {part.connections} workers{_for(tenant)}")
        if size > self.limits.workers:
            raise _RefusedError(
                "bound", f"a job has at most {self.limits.workers} workers here (--max-workers), not {size}"
            )
        window_bytes = message.get("window_bytes", self.limits.window_bytes)
        seconds = message.get("timeout_s", 60.0)
        if not isinstance(window_bytes, int) or window_bytes <= 0:
            raise control.ProtocolError(f"join with window_bytes {window_bytes!r}")
        if not isinstance(seconds, (int, float)) or not seconds > 0:
            raise control.ProtocolError(f"join with timeout_s {seconds!r}")
        window_bytes = min(window_bytes, self.limits.window_bytes)
        seconds = min(seconds, MAX_ASSEMBLY_S)
        job_id = secrets.randbelow(0xFFFFFFFE) + 1
        while job_id in self._ids:
            job_id = secrets.randbelow(0xFFFFFFFE) + 1
        nonces = [secrets.randbits(64) for _ in range(size)]
        drawn = [packet_keys.draw_secret() for _ in range(size)] if self.authenticated else []
        hello_keys = [packet_keys.hello_key(secret, job=job_id, worker=i) for i, secret in enumerate(drawn)]
        host = writer.get_extra_info("sockname")[0]
        try:
            # Twice the window a worker: the kernel counts its own overhead in.
            port = self._plane.open(job_id, self.incarnation, host, nonces, hello_keys, 2 * window_bytes * size)
        except OSError as error:
            raise _RefusedError("port", f"the switch cannot open a data port on {host}: {error}") from None
        granted = self._plane.receive_buffer_bytes(job_id)
        window_bytes = min(window_bytes, granted // (2 * size))
        job = _Job(
            name=name,
            label=label,
            tenant=tenant,
            id=job_id,
            ranks=ranks,
            host=host,
            port=port,
            nonces=nonces,
            secrets=drawn,
            answer_secret=packet_keys.draw_secret(),
            window_bytes=window_bytes,
            deadline=seconds,
            created=time.monotonic(),
        )
        self._jobs[name] = job
        self._ids.add(job_id)
        loop = asyncio.get_running_loop()
        job.timer = loop.call_later(seconds, lambda: self._spawn(self._give_up(job)))
        return job

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _give_up(self, job: _Job) -> None:
        if job.started or self._jobs.get(job.name) is not job:
            return
        absent = [rank for rank in job.ranks if rank not in job.members]
        slow = [rank for rank, member in job.members.items() if member.payload_bytes == 0]
        what = f"rank {_list(absent)} did not join" if absent else f"rank {_list(slow)} did not get a packet through"
        await self._end(job, "absent", f"{what} within {job.deadline:.0f} s")

    async def _ready(self, job: _Job, member: _Member, message: control.Message) -> None:
        payload = message.get("payload_bytes")
        if (
            not isinstance(payload, int)
            or payload % 8
            or not MIN_PAYLOAD_BYTES <= payload <= protocol.MAX_PAYLOAD_BYTES
        ):
            raise control.ProtocolError(f"ready with payload_bytes {payload!r}")
        member.payload_bytes = payload
        if len(job.members) < job.size or any(m.payload_bytes == 0 for m in job.members.values()):
            return
        payload = min(m.payload_bytes for m in job.members.values())
        part, own = self._parts[job.tenant], self._jobs_of(job.tenant)
        free_bytes = part.memory_bytes - sum(other.memory_bytes for other in own)
        free_slots = None if part.slots is None else part.slots - sum(other.slots for other in own)
        window = fitting_window(job.size, payload, job.window_bytes, free_bytes, free_slots, MIN_WINDOW_CHUNKS)
        if window == 0:
            least = protocol.job_memory_bytes(job.size, MIN_WINDOW_CHUNKS, payload)
            await self._end(
                job,
                "full",
                f"this switch is full: the job needs {least / 2**20:.1f} MiB and {2 * MIN_WINDOW_CHUNKS} slots at "
                f"least, {free_bytes / 2**20:.1f} of {part.memory_bytes / 2**20:.1f} MiB"
                + ("" if part.slots is None else f" and {free_slots} of {part.slots} slots")
                + f" are free (--memory){_for(job.tenant)}",
            )
            return
        memory = protocol.job_memory_bytes(job.size, window, payload)
        epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        try:
            self._plane.begin(
                job=job.id,
                epoch=epoch,
                incarnation=self.incarnation,
                workers=job.size,
                window=window,
                payload_bytes=payload,
                keys=_keys(job, epoch),
            )
        except ValueError as error:
            await self._end(job, "absent", str(error))
            return
        job.started = True
        job.epoch = epoch
        self._jobs_started += 1
        job.memory_bytes = memory
        job.slots = 2 * window
        self._memory_bytes += memory
        if job.timer is not None:
            job.timer.cancel()
        what = (
            f"job {job.name}: epoch {epoch} starts with {job.size} workers, window {window} x {payload} bytes, "
            f"{memory / 2**20:.1f} MiB, data port {job.port}, packets {'' if job.secrets else 'not '}authenticated"
        )
        say(
            logging.INFO,
            "started",
            what,
            **job.who,
            epoch=epoch,
            workers=job.size,
            window=window,
            payload_bytes=payload,
            memory_bytes=memory,
            port=job.port,
            authenticated="yes" if job.secrets else "no",
        )
        start = control.encode({"type": "start", "epoch": epoch, "payload_bytes": payload, "window": window})
        # All at once: with a pause between them, one that starts and leaves at once would be told of before the start.
        for other in job.members.values():
            with contextlib.suppress(ConnectionError, RuntimeError):
                other.writer.write(start)

    async def _missing(self, job: _Job, member: _Member, message: control.Message) -> None:
        chunk = message.get("chunk")
        if not isinstance(chunk, int) or not 0 <= chunk < 1 << 64:
            raise control.ProtocolError("missing without a chunk")
        ranks = [job.ranks[worker] for worker in self._plane.missing(job.id, chunk)]
        await _tell(member.writer, {"type": "missing", "serial": message.get("serial"), "ranks": ranks})

    async def _leave(self, job: _Job, member: _Member, reason: str, fault: int | None) -> None:
        if job.members.get(member.rank) is not member:
            return
        del job.members[member.rank]
        what = f"job {job.name}: rank {member.rank} left: {reason}"
        say(logging.INFO, "left", what, **job.who, rank=member.rank)
        if not job.started:
            if self._jobs.get(job.name) is job:
                await self._end(job, "left", f"rank {member.rank} left before the job started: {reason}")
            return
        if not job.members:
            self._close(job)
            return
        for other in list(job.members.values()):
            await _tell(other.writer, {"type": "left", "rank": member.rank, "reason": reason, "fault": fault})

    async def _end(self, job: _Job, kind: str, reason: str) -> None:
        """Refuse what is assembled so far, or end what is under way; everything is given back."""
        if self._jobs.get(job.name) is not job:
            return
        if not job.started:
            self._refusals[kind] += 1
        say(logging.WARNING, "ended", f"job {job.name} ends: {reason}", **job.who, reason=kind)
        members = list(job.members.values())
        job.members.clear()
        self._close(job)
        for member in members:
            await _tell(member.writer, {"type": "refused", "reason": reason})
            member.writer.close()

    def _close(self, job: _Job) -> None:
        if job.timer is not None:
            job.timer.cancel()
        counters = self._plane.counters(job.id)
        self._plane.close(job.id)
        del self._jobs[job.name]
        self._ids.discard(job.id)
        self._memory_bytes -= job.memory_bytes
        if counters is None:
            return
        self._ended.update({name: counters[name] for name in _TOTALS})
        self._ended_drops.update(counters["drops"])
        seconds = time.monotonic() - job.created
        drops = ", ".join(f"{count} {why}" for why, count in counters["drops"].items() if count) or "none"
        what = (
            f"job {job.name} closed after {seconds:.1f} s: {counters['results']} chunks from "
            f"{counters['contributions']} contributions, {counters['answers_sent']} answers "
            f"({counters['answers_again']} again), dropped: {drops}"
        )
        if counters["send_errors"]:
            what += f"; send errors: {counters['send_errors']}, last: {counters['last_send_error']}"
        say(
            logging.INFO,
            "closed",
            what,
            **job.who,
            seconds=seconds,
            result_bytes=counters["result_bytes"],
            contributions=counters["contributions"],
            retransmissions=_retransmissions(counters),
            dropped=sum(counters["drops"].values()),
        )


def _keys(job: _Job, epoch: int) -> tuple[list[bytes], bytes] | None:
    """Of the job's packets in this epoch, None where they carry no tags."""
    if not job.secrets:
        return None
    own = [
        packet_keys.contribution_key(secret, job=job.id, epoch=epoch, worker=worker)
        for worker, secret in enumerate(job.secrets)
    ]
    return own, packet_keys.answer_key(job.answer_secret, job=job.id, epoch=epoch)


def _retransmissions(counters: dict[str, Any]) -> int:
    """Contributions that came again: answered from the kept result, or dropped as known."""
    drops = counters["drops"]
    return int(counters["answers_again"] + drops["duplicate"] + drops["stale"])


async def _read(reader: asyncio.StreamReader) -> control.Message:
    return control.decode(await reader.readexactly(control.length_of(await reader.readexactly(4))))


async def _tell(writer: asyncio.StreamWriter, message: control.Message) -> None:
    # A worker that does not read is as good as gone; its own task will notice.
    with contextlib.suppress(OSError, RuntimeError, *_TIMEOUTS):
        writer.write(control.encode(message))
        await asyncio.wait_for(writer.drain(), 5.0)


def _for(tenant: Tenant) -> str:
    """What a bound is a part of, where it is one."""
    return "" if tenant is EVERYBODY else f"; that is the part of {tenant.name}"


def _ranks(message: control.Message) -> tuple[int, ...]:
    ranks = message.get("ranks")
    if not isinstance(ranks, list) or not ranks or not all(isinstance(rank, int) and rank >= 0 for rank in ranks):
        raise control.ProtocolError("join without the job's ranks")
    if len(set(ranks)) != len(ranks):
        raise control.ProtocolError("join with a rank that is there twice")
    return tuple(ranks)


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
