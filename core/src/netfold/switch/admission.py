"""Admit workers: check a `join` against the token, the quota, and what the job's other ranks sent.

Invariants: a refusal carries its reason. A job's first rank opens the job and its data port; memory is granted when
all ranks have joined.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from netfold._native import auth, fabric, protocol
from netfold.switch.bmv2 import MAX_WORKERS, Bmv2
from netfold.switch.fabrics import Fabrics
from netfold.switch.job import Job, Member, RefusedError
from netfold.switch.ledger import DEFAULT_TENANT, Ledger
from netfold.switch.parent import Link, Parent
from netfold.switch.tokens import Credentials, Tenant
from netfold.switch.tree import TreePosition, position_without_tree, tree_position
from netfold.switch_protocol import control_messages, packet_keys
from netfold.switch_protocol.data_path import ReceiveBuffer, without_strict
from netfold.switch_protocol.job_tree import Contributor, parse_levels

# A job waits at most this long for its ranks, whatever timeout a worker requests.
MAX_ASSEMBLY_S = 600.0
MAX_JOB_NAME = 128
# A job's name for people: a label in metrics and a field of the log.
_LABEL = re.compile(r"[\w.:/+-]{0,64}", re.ASCII)


@dataclass(frozen=True)
class FabricAddress:
    """A worker's address on a fabric, as the worker sent it."""

    provider: str
    name: bytes  # the provider's form of an address
    tag: int  # of packets to the worker

    MAX_PROVIDER = 128
    MAX_NAME_BYTES = 512

    @classmethod
    def parse(cls, value: object) -> FabricAddress:
        fields = value if isinstance(value, dict) else {}
        provider, name, tag = fields.get("provider"), fields.get("name"), fields.get("tag")
        if not isinstance(provider, str) or not 0 < len(provider) <= cls.MAX_PROVIDER:
            raise control_messages.ProtocolError("join over a fabric without a provider")
        if not isinstance(name, bytes) or not 0 < len(name) <= cls.MAX_NAME_BYTES:
            raise control_messages.ProtocolError(f"join over provider {provider} without an address")
        if not isinstance(tag, int) or not 0 <= tag < 1 << 64:
            raise control_messages.ProtocolError(f"join over provider {provider} with the tag {str(tag)[:80]!r}")
        return cls(provider, name, tag)


@dataclass(frozen=True)
class Join:
    """A worker's `join` message, checked: its job, and its own place in the job."""

    name: str  # a digest that only the job's ranks know
    label: str  # the job's name for people
    rank: int  # of the worker; of a switch: the lowest rank below it
    ranks: tuple[int, ...]  # of all workers, where there is no tree; else empty
    port: int | None  # the worker's UDP port; None on a fabric
    fabric: FabricAddress | None
    tree: Any  # the levels from this switch to the root (job_tree.py), not checked; None for a single switch
    switch: object  # the id of a joining switch; None for a worker
    endpoint: str  # where a joining switch listens
    window_bytes: int | None
    timeout_s: float
    encrypt: bool
    speaks_hardware: bool  # the hardware profile

    @classmethod
    def parse(cls, message: control_messages.Message) -> Join:
        """Check the fields of `message`. Raises ProtocolError where it is no valid join."""
        name, label = message.get("job"), message.get("name", "")
        tree = message.get("tree")
        rank, ranks, port = message.get("rank"), () if tree is not None else _ranks(message), message.get("port")
        if not isinstance(name, str) or not 0 < len(name) <= MAX_JOB_NAME:
            raise control_messages.ProtocolError("join without a job name")
        if not isinstance(label, str) or not _LABEL.fullmatch(label):
            raise control_messages.ProtocolError(f"join of a job that is called {str(label)[:80]!r}")
        if not isinstance(rank, int) or (tree is None and rank not in ranks):
            raise control_messages.ProtocolError(f"join as rank {rank!r}, which is not one of the job's {len(ranks)}")
        address = None if message.get("fabric") is None else FabricAddress.parse(message["fabric"])
        if address is None and (not isinstance(port, int) or not 0 < port < 1 << 16):
            raise control_messages.ProtocolError(f"join with the port {port!r}")
        window_bytes, seconds = message.get("window_bytes"), message.get("timeout_s", 60.0)
        if window_bytes is not None and (not isinstance(window_bytes, int) or window_bytes <= 0):
            raise control_messages.ProtocolError(f"join with window_bytes {window_bytes!r}")
        if not isinstance(seconds, (int, float)) or not seconds > 0:
            raise control_messages.ProtocolError(f"join with timeout_s {seconds!r}")
        endpoint = str(message.get("endpoint") or "")
        switch = message.get("switch")
        encrypt = message.get("encrypt", False)
        if not isinstance(encrypt, bool):
            raise control_messages.ProtocolError(f"join with encrypt {str(encrypt)[:80]!r}")
        profiles = message.get("profiles", ())
        speaks_hardware = isinstance(profiles, list) and control_messages.HARDWARE in profiles
        return cls(
            name,
            label,
            rank,
            ranks,
            port,
            address,
            tree,
            switch,
            endpoint,
            window_bytes,
            float(seconds),
            encrypt,
            speaks_hardware,
        )

    @property
    def over(self) -> str:
        """The transport of the worker's packets, as text."""
        return "UDP" if self.fabric is None else f"provider {without_strict(self.fabric.provider)}"


def check_version(message: control_messages.Message) -> None:
    """Raise RefusedError where a connection's first message has another version of the control protocol."""
    below = message.get("switch") is not None or message.get("below")
    them = "the switch below" if below else "the worker"
    problem = control_messages.version_problem(message, them=them, us="this switch")
    if problem:
        raise RefusedError("version", problem)


class Admission:
    """Decide which worker may join which job, and open jobs.

    credentials: of the tenants; None where every peer may join.
    parent: reduces further for jobs with workers beyond this switch.
    fabrics: providers over which packets may come, beside UDP.
    tagged: whether data packets carry a MAC.
    pipeline: reduces in place of the data planes, which then only serve hellos.
    host: where the switch listens. With a wildcard, data ports listen on all addresses too, and answer each worker
        from the address that the worker connected to.
    """

    def __init__(
        self,
        ledger: Ledger,
        incarnation: int,
        credentials: Credentials | None,
        parent: Parent | None,
        fabrics: Fabrics,
        *,
        tagged: bool,
        host: str,
        pipeline: Bmv2 | None,
    ) -> None:
        self._ledger = ledger
        self._incarnation = incarnation
        self._credentials = credentials
        self._parent = parent
        self._fabrics = fabrics
        self._tagged = tagged
        self._pipeline = pipeline
        self._listens_everywhere = _is_unspecified(host)

    def tenant(self, message: control_messages.Message) -> Tenant:
        """Return the tenant whose credential a message of any type carries. Raises RefusedError for an unknown one."""
        if self._credentials is None:
            return DEFAULT_TENANT
        credential = message.get("credential")
        if not isinstance(credential, bytes):
            remedy = "set NETFOLD_TOKEN_FILE to a file with a token of this switch"
            raise RefusedError("token", "this switch requires a token, and none came", remedy)
        tenant = self._credentials.find(credential)
        if tenant is None:
            remedy = "write one there that its --token-file lists; after a change of that file, the switch needs SIGHUP"
            raise RefusedError("token", "this switch does not know the token of NETFOLD_TOKEN_FILE", remedy)
        return tenant

    def admit(
        self,
        message: control_messages.Message,
        writer: asyncio.StreamWriter,
        address: str,
        opened: Callable[[Job], None],
    ) -> tuple[Job, Member]:
        """Add a worker to its job; return the job and the new member.

        opened: called with the job where this worker is its first.
        Raises RefusedError, or ProtocolError for a malformed join.
        """
        if message["type"] != "join":
            raise control_messages.ProtocolError(f"expected join, not {message['type']!r}")
        tenant = self.tenant(message)
        join = Join.parse(message)
        if not tenant.allows_job_name(join.label):
            raise RefusedError(
                "name",
                f"{tenant.name}'s jobs are called {' or '.join(tenant.names)}, not {join.label!r} (NETFOLD_JOB_NAME)",
            )
        if self._pipeline is not None:
            _check_profile(join, self._pipeline)
        job = self._ledger.jobs.get(join.name)
        if job is None:
            job = self._open(join, tenant, writer)
            self._ledger.add(job)
            opened(job)
        _check_same(job, join, tenant)
        number, contributor = _contributor(job, join)
        if number in job.members:
            raise RefusedError(
                "duplicate",
                f"rank {join.rank} of this job has joined before, from {job.members[number].address}: two processes "
                "have the same rank",
            )
        if job.started:
            raise RefusedError("under way", "this job is running; a restarted worker must join with a new group")
        if join.fabric is None:
            # Packets of this worker must come from the host of its control connection.
            local = writer.get_extra_info("sockname")[0] if self._listens_everywhere else ""
            job.plane.set_worker_address(job.id, number, writer.get_extra_info("peername")[0], join.port, local)
        else:
            try:
                job.plane.set_worker_fabric_address(job.id, number, join.fabric.name, join.fabric.tag)
            except fabric.FabricError as error:
                raise RefusedError("fabric", f"rank {join.rank} is nowhere on the fabric: {error}") from None
        where = address if contributor.switch is None else join.endpoint or address
        udp = None if join.port is None else (str(writer.get_extra_info("peername")[0]), join.port)
        member = Member(number, contributor, writer, where, udp, speaks_hardware=join.speaks_hardware)
        job.members[number] = member
        return job, member

    def _open(self, join: Join, tenant: Tenant, writer: asyncio.StreamWriter) -> Job:
        if join.encrypt and not self._tagged:
            raise RefusedError(
                "security",
                "the job's packets are to be encrypted, and this switch has no keys: start it with --token-file",
            )
        position = self._position(join)
        size = len(position.contributors)
        if self._pipeline is not None and size > MAX_WORKERS:
            raise RefusedError(
                "bound", f"this switch is a P4 pipeline, whose jobs have at most {MAX_WORKERS} workers, not {size}"
            )
        self._ledger.check_quota(tenant, size)
        limit_bytes = self._ledger.limits.window_bytes
        window_bytes = limit_bytes if join.window_bytes is None else min(join.window_bytes, limit_bytes)
        job_id = self._ledger.draw_id()
        nonces = [secrets.randbits(64) for _ in range(size)]
        worker_secrets = [packet_keys.draw_secret() for _ in range(size)] if self._tagged else []
        hello_keys = [packet_keys.hello_key(secret, job=job_id, worker=i) for i, secret in enumerate(worker_secrets)]
        proofs = [] if join.fabric is None else _different_numbers(nonces)
        host = writer.get_extra_info("sockname")[0]
        plane = self._ledger.least_loaded_plane()
        port, provider, endpoint = None, None, None
        try:
            if join.fabric is None:
                # Twice the window of each worker, because the kernel counts its own overhead too.
                bound_host = _wildcard(host) if self._listens_everywhere else host
                port = plane.open(job_id, self._incarnation, bound_host, nonces, hello_keys, 2 * window_bytes * size)
            else:
                provider = self._fabrics.name_of(join.fabric.provider)
                if provider is None:
                    raise RefusedError(
                        "fabric",
                        f"this switch takes packets over {self._fabrics}, and not over {join.over}: start it with "
                        "--fabric, or the job without that NETFOLD_TRANSPORT",
                    )
                endpoint = plane.open_on_fabric(
                    job=job_id,
                    incarnation=self._incarnation,
                    provider=provider,
                    host=host,
                    nonces=nonces,
                    proofs=proofs,
                    hello_keys=hello_keys,
                    packet_bytes=control_messages.FABRIC_PAYLOAD_BYTES + protocol.HEADER_BYTES + auth.MAC_BYTES,
                    in_flight_bytes=window_bytes,
                )
        except OSError as error:  # fabric.FabricError is one
            raise RefusedError("port", f"the switch cannot open a data port on {host}: {error}") from None
        if endpoint is not None:
            needs, free = endpoint["buffer_bytes"], self._ledger.available(tenant)["memory_bytes"]
            if needs > free:
                plane.close(job_id)
                raise RefusedError(
                    "full",
                    f"this switch is full: buffers for packets over {join.over} take {needs / 2**20:.1f} MiB, and "
                    f"{free / 2**20:.1f} MiB are free (--memory); a smaller NETFOLD_WINDOW_BYTES needs less",
                )
        buffer = None
        if join.fabric is None:
            buffer = ReceiveBuffer(plane.receive_buffer_bytes(job_id), window_bytes)
            window_bytes = buffer.held_bytes(size)
        return Job(
            name=join.name,
            label=join.label,
            tenant=tenant,
            id=job_id,
            tree=join.tree,
            position=position,
            plane=plane,
            link=None if position.parent is None or self._parent is None else Link(self._parent, self._pipeline),
            port=port,
            provider=provider,
            fabric=endpoint,
            nonces=nonces,
            proofs=proofs,
            secrets=worker_secrets,
            result_secret=packet_keys.draw_secret(),
            encrypts=join.encrypt,
            buffer=buffer,
            window_bytes=window_bytes,
            deadline=min(join.timeout_s, MAX_ASSEMBLY_S),
            created=time.monotonic(),
        )

    def _position(self, join: Join) -> TreePosition:
        if join.tree is None:
            return position_without_tree(join.ranks)
        try:
            levels = parse_levels(join.tree)
        except (TypeError, ValueError) as error:
            raise control_messages.ProtocolError(f"join with a tree that is none: {error}") from None
        try:
            position = tree_position(self._incarnation, levels)
        except ValueError as error:
            raise RefusedError("tree", str(error)) from None
        if position.parent is not None and self._parent is None:
            raise RefusedError(
                "tree", "this switch has no parent (--parent), and the job has workers that are not below it"
            )
        return position


def _check_profile(join: Join, pipeline: Bmv2) -> None:
    """Raise RefusedError where a pipeline cannot serve the worker of `join`."""
    if not join.speaks_hardware:
        raise RefusedError(
            "profile",
            f"rank {join.rank} speaks the full aggregation protocol only, and this switch is a P4 pipeline with the "
            "hardware profile (--dataplane bmv2): update netfold on the worker, or use a switch with --dataplane user",
        )
    if pipeline.lost:
        raise RefusedError("pipeline", f"this switch is a P4 pipeline, which is lost: {pipeline.lost}")
    if join.port is None:
        raise RefusedError("profile", f"this switch is a P4 pipeline, which takes packets over UDP and not {join.over}")


def _check_same(job: Job, join: Join, tenant: Tenant) -> None:
    """Raise RefusedError where this rank describes the job otherwise than the ranks before it."""
    if job.tenant != tenant:
        raise RefusedError("token", "this job belongs to another token: all its ranks need the same token")
    mismatch = ""
    if job.over != join.over:
        mismatch = f"'s packets come over {join.over}, others' over {job.over}: all ranks of a job need the same "
        mismatch += "(NETFOLD_TRANSPORT)"
    elif job.encrypts != join.encrypt:
        own, others = ("requires", "do not") if join.encrypt else ("does not require", "do")
        mismatch = f" {own} encrypted packets, and other ranks {others}: all ranks of a job need the same "
        mismatch += "(NETFOLD_SECURITY)"
    elif job.tree != join.tree:
        mismatch = " has another tree of switches than the job's other ranks"
    elif job.tree is None and len(join.ranks) != job.position.workers:
        mismatch = f" has {len(join.ranks)} ranks in its job; other ranks have {job.position.workers}"
    elif job.tree is None and any(
        each.rank != rank for each, rank in zip(job.position.contributors, join.ranks, strict=True)
    ):
        mismatch = f" has the ranks {', '.join(map(str, join.ranks))} in its job; other ranks have different ones"
    if mismatch:
        raise RefusedError("mismatch", f"rank {join.rank}{mismatch}")


def _is_unspecified(host: str) -> bool:
    """Return whether `host` is a wildcard address; a host name is not."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _wildcard(local: str) -> str:
    """Return the wildcard address of the family of `local`."""
    return "::" if ":" in local else "0.0.0.0"


def _different_numbers(nonces: Sequence[int]) -> list[int]:
    """Draw a random 64-bit number for each nonce that differs from the nonce."""
    return [nonce ^ (secrets.randbelow((1 << 64) - 1) + 1) for nonce in nonces]


def _ranks(message: control_messages.Message) -> tuple[int, ...]:
    ranks = message.get("ranks")
    if not isinstance(ranks, list) or not ranks or not all(isinstance(rank, int) and rank >= 0 for rank in ranks):
        raise control_messages.ProtocolError("join without the job's ranks")
    if len(set(ranks)) != len(ranks):
        raise control_messages.ProtocolError("join with a rank that occurs twice")
    return tuple(ranks)


def _contributor(job: Job, join: Join) -> tuple[int, Contributor]:
    """Return the joining contributor and its number at this switch.

    Raises RefusedError where the job's tree has no such contributor here.
    """
    for number, each in enumerate(job.position.contributors):
        if each.rank == join.rank and each.switch == join.switch:
            return number, each
    what = f"rank {join.rank}" if join.switch is None else "a switch"
    raise RefusedError("tree", f"{what} joins this switch, but the tree of its job puts it elsewhere")
