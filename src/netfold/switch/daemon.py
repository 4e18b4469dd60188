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
from netfold.switch.parent import Link, Parent, ParentError
from netfold.switch.parts import Limits, Part, fitting_window, part_of
from netfold.switch.streams import TIMEOUTS, read, tell
from netfold.switch.tokens import Tenant, Tokens
from netfold.switch.tree import MAX_DEPTH, Child, Place, alone, place_of

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
# For a neighbour in the tree to say who it waits for; workers give the whole tree a second.
_ASK_S = 0.7
# A complete leaf waits so much longer than its parent, which knows better who is absent.
_GRACE_S = 2.0


@dataclass
class _Member:
    """One that joined: a rank, or a switch with the ranks below it."""

    child: Child
    ranks: tuple[int, ...]
    writer: asyncio.StreamWriter
    address: str  # of the connection; of a switch: where it listens
    payload_bytes: int = 0
    window: int | None = None  # the most chunks that a switch can grant

    @property
    def rank(self) -> int:
        return self.ranks[0]

    @property
    def who(self) -> str:
        return f"rank {self.rank}" if self.child.switch is None else f"the switch of rank {_list(self.ranks)}"


@dataclass
class _Job:
    name: str  # a digest that only its ranks know
    label: str
    tenant: Tenant
    id: int
    ranks: tuple[int, ...]  # what its workers, by number, are called; of the whole tree
    paths: Any  # of its workers, as they said
    place: Place
    plane: Plane
    host: str
    port: int
    nonces: list[int]
    secrets: list[bytes]  # of workers, by number; empty where packets carry no tags
    answer_secret: bytes
    window_bytes: int
    deadline: float
    created: float
    members: dict[int, _Member] = field(default_factory=dict)  # by number here
    link: Link | None = None  # to the parent
    climb: asyncio.Task[None] | None = None  # reads from it
    left: set[int] = field(default_factory=set)  # ranks of which all were told
    asked: dict[int, asyncio.Future[list[int]]] = field(default_factory=dict)  # by serial: who misses what
    started: bool = False
    epoch: int = 0
    memory_bytes: int = 0
    slots: int = 0
    timer: asyncio.TimerHandle | None = None

    @property
    def size(self) -> int:
        """Who contributes here."""
        return len(self.place.children)

    def ranks_of(self, child: Child) -> tuple[int, ...]:
        return tuple(self.ranks[worker] for worker in child.workers)

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
    packets are authenticated too. parent: where sums of jobs go that have workers beyond this switch. threads: that
    handle packets, each those of jobs of its own. ValueError for what contradicts itself or cannot be had here, OSError
    where the certificate cannot be kept.
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
        self._parent = parent
        self._asking: asyncio.Task[control.Message] | None = None  # the way up, for workers
        self._listens = (host, port)
        self._planes = [Plane() for _ in range(threads)]
        self._jobs: dict[str, _Job] = {}
        self._ids: set[int] = set()
        self._memory_bytes = 0
        # An epoch is never given twice in an incarnation, not even to a job of the same name.
        self._next_epoch = 1
        self._tasks: set[asyncio.Task[Any]] = set()
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
        self._listens = self._entrance.start()
        endpoint = control.format_endpoint(*self._listens)
        if self.fingerprint is None:
            what = f"no tokens and no TLS: whoever reaches {endpoint} may join, and packets are not authenticated"
            say(logging.WARNING, "open", what, address=endpoint)
            return endpoint
        return f"{endpoint}#{self.fingerprint}"

    async def meet_parent(self) -> None:
        """Look whether the parent is there, and say so in the log. ValueError where it is below this switch itself."""
        if self._parent is None:
            return
        where = self._parent.endpoint
        try:
            path = await self._parent.path([self.incarnation])
        except ParentError as error:
            if error.loop:
                raise ValueError(str(error)) from None
            say(logging.WARNING, "parent", f"{error}; until it is there jobs must end at this switch", parent=where)
            return
        levels = 1 + len(path["switches"])
        say(logging.INFO, "parent", f"below the switch at {where}, {levels} levels in all", parent=where, levels=levels)

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
            "threads": len(self._planes),
            "cpu_s": sum(plane.cpu_ns() for plane in self._planes) / 1e9,
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
            "parent": None if self._parent is None else self._parent_status(self._parent),
            "tenants": [self._tenant_status(tenant, part) for tenant, part in self._parts.items()],
            "jobs": jobs,
        }

    def _parent_status(self, parent: Parent) -> dict[str, Any]:
        jobs = sum(job.link is not None for job in self._jobs.values())
        return {"endpoint": parent.endpoint, "jobs": jobs, "trouble": parent.trouble}

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
        counters = job.plane.counters(job.id)
        assert counters is not None, "a job is there as long as its data port"
        parts = [job.ranks_of(child) for child in job.place.children]
        lags = zip(parts, counters["arrivals"], counters["arrival_lag_ns"], counters["last_arrivals"], strict=True)
        return {
            "id": f"{job.id:08x}",
            "name": job.label,
            "tenant": job.tenant.name,
            "state": "running" if job.started else "assembling",
            "size": job.size,
            "joined": len(job.members),
            "parent": None if job.link is None else job.link.parent.endpoint,
            "epoch": job.epoch,
            "port": job.port,
            "age_s": time.monotonic() - job.created,
            "memory_bytes": job.memory_bytes,
            "retransmissions": _retransmissions(counters),
            "counters": counters,
            "ranks": [
                # A leaf is named by the lowest rank below it; `below` are all of them.
                {"rank": ranks[0], "below": list(ranks[1:]), "arrivals": arrivals, "lag_s": lag_ns / 1e9, "last": last}
                for ranks, arrivals, lag_ns, last in lags
            ],
        }

    async def _on_guest(self, guest: Guest) -> None:
        address = guest.address
        try:
            await self._serve(guest)
        except _RefusedError as refusal:
            self._refusals[refusal.kind] += 1
            say(logging.WARNING, "refused", f"refused {address}: {refusal}", peer=address, reason=refusal.kind)
            loop = {"loop": True} if refusal.kind == "loop" else {}
            await tell(guest.writer, {"type": "refused", "reason": str(refusal), **loop})
        except (control.ProtocolError, asyncio.IncompleteReadError, OSError, *TIMEOUTS) as error:
            what = f"dropped connection from {address} before it joined: {error or type(error).__name__}"
            say(logging.WARNING, "stranger", what, peer=address)

    async def _serve(self, guest: Guest) -> None:
        reader, writer = guest.reader, guest.writer
        first = await read(reader)
        if first["type"] == "path":
            await tell(writer, await self._path(first))
            return
        job, member = self._admit(first, writer, guest.address)
        guest.admitted()
        reason, fault, gone = "its connection was lost", None, ""
        try:
            number = job.place.children.index(member.child)
            admitted: control.Message = {
                "type": "admitted",
                "job_id": job.id,
                "incarnation": self.incarnation,
                "worker": number,
                "nonce": job.nonces[number],
                "port": job.port,
            }
            if job.secrets:
                admitted |= {"secret": job.secrets[number], "answer_secret": job.answer_secret}
            await tell(writer, admitted)
            while True:
                message = await read(reader)
                kind = message["type"]
                if kind == "ready":
                    await self._ready(job, member, message)
                elif kind == "missing":
                    await self._missing(job, member, message)
                elif kind == "left" and member.child.switch is not None:
                    if message.get("rank") not in member.ranks:
                        raise control.ProtocolError(f"left of rank {message.get('rank')!r}, which is not below it")
                    await self._announce(job, message, member)
                elif kind == "leave":
                    reason, fault = str(message.get("reason", ""))[:512] or "it left", message.get("fault")
                    gone = str(message.get("switch", ""))
                    return
                else:
                    raise control.ProtocolError(f"unknown message {kind!r}")
        except _RefusedError:
            reason = "it was refused"
            raise
        except control.ProtocolError as error:
            reason = f"it broke the control protocol: {error}"
            what = f"job {job.name}: {member.who}: {reason}"
            say(logging.WARNING, "protocol_error", what, **job.who, rank=member.rank)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            await self._leave(job, member, reason, fault if isinstance(fault, int) else None, gone)

    async def _path(self, message: control.Message) -> control.Message:
        """What is above whoever asks: this switch, its parent, and so on."""
        self._check_version(message)
        self._tenant(message)
        below = message.get("below")
        if not isinstance(below, list) or not all(isinstance(each, int) for each in below):
            raise control.ProtocolError("path without the switches that ask")
        if self.incarnation in below:
            raise _RefusedError(
                "loop", "the parents of these switches go in a circle, and this one is in it: look at each --parent"
            )
        if len(below) >= MAX_DEPTH:
            raise _RefusedError("bound", f"a tree has at most {MAX_DEPTH} levels of switches")
        own = [self.incarnation, ""]
        if self._parent is None:
            return {"type": "path", "switches": [own], "broken": ""}
        try:
            if below:
                above = await self._parent.path([*below, self.incarnation])
            else:  # many workers ask at once, and hear one answer
                if self._asking is None or self._asking.done():
                    self._asking = self._spawn(self._parent.path([self.incarnation]))
                above = await asyncio.shield(self._asking)
        except ParentError as error:
            if error.loop:
                raise _RefusedError("loop", str(error)) from None
            return {"type": "path", "switches": [own], "broken": str(error)}
        (parent, _), *rest = above["switches"]
        switches = [own, [parent, self._parent.full_endpoint], *rest]
        return {"type": "path", "switches": switches, "broken": above["broken"]}

    def _admit(self, message: control.Message, writer: asyncio.StreamWriter, address: str) -> tuple[_Job, _Member]:
        if message["type"] != "join":
            raise control.ProtocolError(f"expected join, not {message['type']!r}")
        self._check_version(message)
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
            if job.link is not None:
                job.climb = self._spawn(self._climb(job, job.link))
        if job.tenant != tenant:
            raise _RefusedError("token", "this job belongs to another token: all its ranks need the same")
        if len(job.ranks) != len(ranks):
            raise _RefusedError(
                "mismatch", f"rank {rank} says that its job has {len(ranks)} ranks; others said {len(job.ranks)}"
            )
        if job.ranks != ranks:
            raise _RefusedError(
                "mismatch",
                f"rank {rank} says that the ranks of its job are {_list(ranks)}; others said other ones",
            )
        if job.paths != message.get("paths"):
            raise _RefusedError(
                "mismatch", f"rank {rank} says that its job has another tree of switches than others said"
            )
        number, child = _child(job, ranks.index(rank), message.get("switch"))
        ours = job.ranks_of(child)
        if number in job.members:
            raise _RefusedError(
                "duplicate",
                f"rank {rank} of this job has joined before, from {job.members[number].address}: two processes were "
                "started with the same rank",
            )
        if job.started:
            raise _RefusedError("under way", "this job is under way; a restarted worker must come with a new group")
        # Its packets will come from where it speaks now, and from no other host.
        job.plane.expect(job.id, number, writer.get_extra_info("peername")[0], port)
        listens = message.get("endpoint", "")
        member = job.members[number] = _Member(
            child, ours, writer, address if child.switch is None else f"{listens or address}"
        )
        what = f"job {name}: {member.who} of {len(ranks)} joined from {member.address}"
        say(logging.INFO, "joined", what, **job.who, rank=_name(ours), peer=address)
        return job, member

    def _check_version(self, message: control.Message) -> None:
        if message.get("version") != control.VERSION:
            raise _RefusedError(
                "version",
                f"this switch speaks control protocol {control.VERSION}, the worker {message.get('version')}: "
                "run the same netfold on both sides",
            )

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
        place = self._place(message, len(ranks))
        size = len(place.children)
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
        # The thread with the fewest jobs: a group that goes over this switch twice has two of them.
        plane = min(self._planes, key=lambda each: sum(job.plane is each for job in self._jobs.values()))
        try:
            # Twice the window a worker: the kernel counts its own overhead in.
            port = plane.open(job_id, self.incarnation, host, nonces, hello_keys, 2 * window_bytes * size)
        except OSError as error:
            raise _RefusedError("port", f"the switch cannot open a data port on {host}: {error}") from None
        granted = plane.receive_buffer_bytes(job_id)
        window_bytes = min(window_bytes, granted // (2 * size))
        job = _Job(
            name=name,
            label=label,
            tenant=tenant,
            id=job_id,
            ranks=ranks,
            paths=message.get("paths"),
            place=place,
            plane=plane,
            link=None if place.parent is None or self._parent is None else Link(self._parent),
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

    def _place(self, message: control.Message, size: int) -> Place:
        paths = message.get("paths")
        if paths is None:
            return alone(size)
        if (
            not isinstance(paths, list)
            or len(paths) != size
            or not all(isinstance(path, list) and all(isinstance(each, int) for each in path) for path in paths)
        ):
            raise control.ProtocolError("join with paths that are not a list of ids for each worker")
        try:
            place = place_of(self.incarnation, paths)
        except ValueError as error:
            raise _RefusedError("tree", str(error)) from None
        if place.parent is not None and self._parent is None:
            raise _RefusedError("tree", "this switch has no parent (--parent), and the job has workers beyond it")
        return place

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _climb(self, job: _Job, link: Link) -> None:
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
        }
        reason, gone = "it closed the connection", link.parent.endpoint
        try:
            await link.join(join, self._listens, seconds)
            job.plane.connect_parent(job.id, link.port, link.host, link.to_port)
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
                        raise control.ProtocolError(f"start with window {window} x {payload} bytes")
                    await self._begin(job, payload, window, int(told["epoch"]))
                elif kind == "left":
                    if told.get("rank") not in job.ranks:
                        raise control.ProtocolError(f"left of rank {told.get('rank')!r}, which the job does not have")
                    await self._announce(job, told, None)
                elif kind == "missing":
                    await self._missing(job, None, told)
                elif kind == "refused":
                    reason, gone = str(told.get("reason")), str(told.get("switch") or gone)
                    break
                else:
                    raise control.ProtocolError(f"unknown message {kind!r}")
        except ParentError as error:
            await self._end(job, "parent", str(error))
            return
        except (asyncio.IncompleteReadError, OSError, ValueError, KeyError, TypeError) as error:
            if not isinstance(error, asyncio.IncompleteReadError):
                reason = str(error)
        if job.started:
            link.parent.trouble = f"the parent switch at {link.parent.endpoint} ended a job: {reason}"
            await self._end(job, "parent", reason, gone)
        else:
            await self._end(job, "parent", str(link.parent.error(f"refused: {reason}")))

    async def _give_up(self, job: _Job) -> None:
        # What a leaf waits for it knows best, and has a deadline of its own.
        if any(member.child.switch is not None and member.payload_bytes == 0 for member in job.members.values()):
            await asyncio.sleep(_GRACE_S)
        if job.started or self._jobs.get(job.name) is not job:
            return
        absent = [
            rank
            for number, child in enumerate(job.place.children)
            if number not in job.members
            for rank in job.ranks_of(child)
        ]
        slow = [rank for member in job.members.values() if member.payload_bytes == 0 for rank in member.ranks]
        if absent:
            what = f"rank {_list(absent)} did not join"
        elif slow:
            what = f"rank {_list(slow)} did not get a packet through"
        else:
            assert job.link is not None, "a job without a parent starts when all are ready"
            await asyncio.sleep(_GRACE_S)
            what = f"the parent switch at {job.link.parent.endpoint} did not begin"
        await self._end(job, "absent", f"{what} within {job.deadline:.0f} s")

    async def _ready(self, job: _Job, member: _Member, message: control.Message) -> None:
        payload = message.get("payload_bytes")
        if (
            not isinstance(payload, int)
            or payload % 8
            or not MIN_PAYLOAD_BYTES <= payload <= protocol.MAX_PAYLOAD_BYTES
        ):
            raise control.ProtocolError(f"ready with payload_bytes {payload!r}")
        window = message.get("window")
        if window is not None and (not isinstance(window, int) or window < MIN_WINDOW_CHUNKS):
            raise control.ProtocolError(f"ready with window {window!r}")
        member.payload_bytes, member.window = payload, window
        await self._advance(job)

    async def _advance(self, job: _Job) -> None:
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
        part, own = self._parts[job.tenant], self._jobs_of(job.tenant)
        free_bytes = part.memory_bytes - sum(other.memory_bytes for other in own)
        free_slots = None if part.slots is None else part.slots - sum(other.slots for other in own)
        has_parent = link is not None
        window = fitting_window(
            job.size, payload, job.window_bytes, free_bytes, free_slots, MIN_WINDOW_CHUNKS, has_parent
        )
        if window == 0:
            least = protocol.job_memory_bytes(job.size, MIN_WINDOW_CHUNKS, payload, has_parent)
            await self._end(
                job,
                "full",
                f"this switch is full: the job needs {least / 2**20:.1f} MiB and {2 * MIN_WINDOW_CHUNKS} slots at "
                f"least, {free_bytes / 2**20:.1f} of {part.memory_bytes / 2**20:.1f} MiB"
                + ("" if part.slots is None else f" and {free_slots} of {part.slots} slots")
                + f" are free (--memory){_for(job.tenant)}",
            )
            return
        # One line, one window: every switch of the tree grants the least of them.
        window = min([window, *(member.window for member in job.members.values() if member.window is not None)])
        if link is None:
            await self._begin(job, payload, window)
            return
        # Granted now, and not more later: the parent's word is at most this.
        self._grant(job, window, payload)
        link.ready = payload, window
        await link.tell({"type": "ready", "payload_bytes": payload, "window": window})

    def _grant(self, job: _Job, window: int, payload: int) -> None:
        memory = protocol.job_memory_bytes(job.size, window, payload, job.link is not None)
        self._memory_bytes += memory - job.memory_bytes
        job.memory_bytes = memory
        job.slots = 2 * window

    async def _begin(self, job: _Job, payload: int, window: int, parent_epoch: int = 0) -> None:
        self._grant(job, window, payload)
        epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        parent = None
        if job.link is not None:
            parent_job, incarnation, worker = job.link.numbers
            parent = (parent_job, parent_epoch, incarnation, worker)
        try:
            job.plane.begin(
                job=job.id,
                epoch=epoch,
                incarnation=self.incarnation,
                workers=job.size,
                window=window,
                payload_bytes=payload,
                keys=_keys(job, epoch),
                parent=parent,
                parent_keys=None if job.link is None else job.link.keys(parent_epoch),
                names=[child.name for child in job.place.children],
            )
        except ValueError as error:
            await self._end(job, "absent", str(error))
            return
        job.started = True
        job.epoch = epoch
        self._jobs_started += 1
        if job.timer is not None:
            job.timer.cancel()
        what = (
            f"job {job.name}: epoch {epoch} starts with {job.size} workers, window {window} x {payload} bytes, "
            f"{job.memory_bytes / 2**20:.1f} MiB, data port {job.port}, packets {'' if job.secrets else 'not '}"
            + "authenticated"
            + ("" if job.link is None else f", below {job.link.parent.endpoint}")
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
            memory_bytes=job.memory_bytes,
            port=job.port,
            authenticated="yes" if job.secrets else "no",
            parent=None if job.link is None else job.link.parent.endpoint,
        )
        start = control.encode({"type": "start", "epoch": epoch, "payload_bytes": payload, "window": window})
        # All at once: with a pause between them, one that starts and leaves at once would be told of before the start.
        for other in job.members.values():
            with contextlib.suppress(ConnectionError, RuntimeError):
                other.writer.write(start)

    async def _missing(self, job: _Job, member: _Member | None, message: control.Message) -> None:
        """A question, or an answer to one of ours; `member`: whose, None for the parent's."""
        ranks, chunk, serial = message.get("ranks"), message.get("chunk"), message.get("serial")
        if isinstance(ranks, list) and isinstance(serial, int):
            answer = job.asked.get(serial)
            if answer is not None and not answer.done():
                answer.set_result([rank for rank in ranks if rank in job.ranks])
            return
        if not isinstance(chunk, int) or not 0 <= chunk < 1 << 64:
            raise control.ProtocolError("missing without a chunk")
        self._spawn(self._say_missing(job, member, chunk, serial))

    async def _say_missing(self, job: _Job, member: _Member | None, chunk: int, serial: object) -> None:
        """Those that this switch waits for; of switches, who they wait for: each is asked away from who asks."""
        ranks: set[int] = set()
        asks = []
        for number in job.plane.missing(job.id, chunk):
            child, other = job.place.children[number], job.members.get(number)
            if child.switch is None:
                ranks.update(job.ranks_of(child))
            elif other is not None and other is not member:
                asks.append(self._ask(job, other, chunk))
        if job.link is not None and member is not None:
            asks.append(self._ask(job, job.link, chunk))
        for answer in await asyncio.gather(*asks):
            ranks.update(answer)
        said = {"type": "missing", "serial": serial, "ranks": sorted(ranks)}
        if member is not None:
            await tell(member.writer, said)
        elif job.link is not None:
            await job.link.tell(said)

    async def _ask(self, job: _Job, other: _Member | Link, chunk: int) -> list[int]:
        serial = secrets.randbits(63)
        answer = job.asked[serial] = asyncio.get_running_loop().create_future()
        question = {"type": "missing", "chunk": chunk, "serial": serial}
        try:
            await (other.tell(question) if isinstance(other, Link) else tell(other.writer, question))
            return await asyncio.wait_for(answer, _ASK_S)
        except TIMEOUTS:
            return []
        finally:
            del job.asked[serial]

    async def _leave(self, job: _Job, member: _Member, reason: str, fault: int | None, gone: str) -> None:
        number = job.place.children.index(member.child)
        if job.members.get(number) is not member:
            return
        del job.members[number]
        what = f"job {job.name}: {member.who} left: {reason}"
        say(logging.INFO, "left", what, **job.who, rank=_name(member.ranks))
        if not job.started:
            if self._jobs.get(job.name) is job:
                await self._end(job, "left", f"{member.who} left before the job started: {reason}")
            return
        if member.child.switch is None:
            message = {"type": "left", "rank": member.rank, "reason": reason, "fault": fault}
            await self._announce(job, message, member)
        elif not job.left.issuperset(member.ranks):
            # Those below have not gone: their switch has, and nobody adds for them any more.
            await self._end(job, "switch", reason, gone or member.address)
            return
        if not job.members and self._jobs.get(job.name) is job:
            self._close(job, "all below it left")

    async def _announce(self, job: _Job, left: control.Message, source: _Member | None) -> None:
        """Tell all but who said so that a rank has left; `source`: None for the parent."""
        job.left.add(left["rank"])
        message = {key: left.get(key) for key in ("type", "rank", "reason", "fault")}
        if source is not None and job.link is not None:
            await job.link.tell(message)
        for other in list(job.members.values()):
            if other is not source:
                await tell(other.writer, message)

    async def _end(self, job: _Job, kind: str, reason: str, gone: str = "") -> None:
        """Refuse what is assembled so far, or end what is under way; everything is given back.

        gone: the address of the switch that is the reason, where it is not this one.
        """
        if self._jobs.get(job.name) is not job:
            return
        if not job.started:
            self._refusals[kind] += 1
        what = f"job {job.name} ends: " + (f"the switch at {gone} is gone: {reason}" if gone else reason)
        say(logging.WARNING, "ended", what, **job.who, reason=kind)
        members = list(job.members.values())
        job.members.clear()
        switch = {"switch": gone} if gone else {}
        self._close(job, reason, **switch)
        for member in members:
            await tell(member.writer, {"type": "refused", "reason": reason, **switch})
            member.writer.close()

    def _close(self, job: _Job, reason: str, **more: str) -> None:
        """Give everything back; the parent hears `reason`, and more."""
        if job.timer is not None:
            job.timer.cancel()
        if job.link is not None:
            job.link.leave({"type": "leave", "reason": reason, **more})
        if job.climb is not None and job.climb is not asyncio.current_task():
            job.climb.cancel()
        counters = job.plane.counters(job.id)
        job.plane.close(job.id)
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


def _child(job: _Job, worker: int, switch: object) -> tuple[int, Child]:
    """Who joins, with its number here: worker `worker`, or the switch of that id with it as the lowest below."""
    for number, child in enumerate(job.place.children):
        if child.name == worker and child.switch == switch:
            return number, child
    what = f"rank {job.ranks[worker]}" if switch is None else "a switch"
    raise _RefusedError("tree", f"{what} joins here, and by the tree of this job it does not")


def _name(ranks: Sequence[int]) -> str:
    """A label for whom a contribution is from."""
    return "+".join(map(str, ranks))


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
