"""Who may join which job: a worker's `join`, word by word, against the token, the room there is, and the other ranks'.

Always: a refusal carries its reason; a job is opened, with its data port, by the first of its ranks, and granted memory
only when all are there.
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
from netfold.switch.fabrics import Fabrics
from netfold.switch.job import Job, Member, RefusedError, listed
from netfold.switch.ledger import DEFAULT_TENANT, Ledger
from netfold.switch.parent import Link, Parent
from netfold.switch.tokens import Tenant, Tokens
from netfold.switch.tree import Child, TreePosition, single_switch, tree_position
from netfold.switch_protocol import control_messages, packet_keys
from netfold.switch_protocol.data_path import ReceiveBuffer, without_strict

# Longest that a job waits for its ranks, whatever a worker asks for.
MAX_ASSEMBLY_S = 600.0
MAX_JOB_NAME = 128
# What people call a job: a label in metrics and a word in the log.
_LABEL = re.compile(r"[\w.:/+-]{0,64}", re.ASCII)


@dataclass(frozen=True)
class FabricAddress:
    """Where a worker is on a fabric, by its own word: an address as the provider has it, and the tag that it wants."""

    provider: str
    name: bytes
    tag: int

    MAX_PROVIDER = 128
    MAX_NAME_BYTES = 512

    @classmethod
    def parse(cls, said: object) -> FabricAddress:
        words = said if isinstance(said, dict) else {}
        provider, name, tag = words.get("provider"), words.get("name"), words.get("tag")
        if not isinstance(provider, str) or not 0 < len(provider) <= cls.MAX_PROVIDER:
            raise control_messages.ProtocolError("join over a fabric without a provider")
        if not isinstance(name, bytes) or not 0 < len(name) <= cls.MAX_NAME_BYTES:
            raise control_messages.ProtocolError(f"join over provider {provider} without an address there")
        if not isinstance(tag, int) or not 0 <= tag < 1 << 64:
            raise control_messages.ProtocolError(f"join over provider {provider} with the tag {str(tag)[:80]!r}")
        return cls(provider, name, tag)


@dataclass(frozen=True)
class Join:
    """What a worker says of its job, and of itself in it; ProtocolError where that is no join."""

    name: str
    label: str
    rank: int
    ranks: tuple[int, ...]
    port: int | None
    fabric: FabricAddress | None
    paths: Any
    switch: object
    endpoint: str
    window_bytes: int | None
    timeout_s: float
    encrypt: bool

    @classmethod
    def parse(cls, message: control_messages.Message) -> Join:
        name, label = message.get("job"), message.get("name", "")
        rank, ranks, port = message.get("rank"), _ranks(message), message.get("port")
        if not isinstance(name, str) or not 0 < len(name) <= MAX_JOB_NAME:
            raise control_messages.ProtocolError("join without a job name")
        if not isinstance(label, str) or not _LABEL.fullmatch(label):
            raise control_messages.ProtocolError(f"join of a job that is called {str(label)[:80]!r}")
        if not isinstance(rank, int) or rank not in ranks:
            raise control_messages.ProtocolError(f"join as rank {rank!r}, which is not one of the job's {len(ranks)}")
        place = None if message.get("fabric") is None else FabricAddress.parse(message["fabric"])
        if place is None and (not isinstance(port, int) or not 0 < port < 1 << 16):
            raise control_messages.ProtocolError(f"join with the port {port!r}")
        window_bytes, seconds = message.get("window_bytes"), message.get("timeout_s", 60.0)
        if window_bytes is not None and (not isinstance(window_bytes, int) or window_bytes <= 0):
            raise control_messages.ProtocolError(f"join with window_bytes {window_bytes!r}")
        if not isinstance(seconds, (int, float)) or not seconds > 0:
            raise control_messages.ProtocolError(f"join with timeout_s {seconds!r}")
        endpoint = str(message.get("endpoint") or "")
        paths, switch = message.get("paths"), message.get("switch")
        encrypt = message.get("encrypt", False)
        if not isinstance(encrypt, bool):
            raise control_messages.ProtocolError(f"join with encrypt {str(encrypt)[:80]!r}")
        return cls(
            name, label, rank, ranks, port, place, paths, switch, endpoint, window_bytes, float(seconds), encrypt
        )

    @property
    def over(self) -> str:
        """What its packets come over, in words."""
        return "UDP" if self.fabric is None else f"provider {without_strict(self.fabric.provider)}"


def check_version(message: control_messages.Message) -> None:
    """Raise RefusedError where a connection's first message is of another version of the control protocol."""
    below = message.get("switch") is not None or message.get("below")
    them = "the switch below" if below else "the worker"
    problem = control_messages.version_problem(message, them=them, us="this switch")
    if problem:
        raise RefusedError("version", problem)


class Admission:
    """tokens: None where everybody may join. parent: where sums go of jobs with workers beyond this switch. fabrics:
    that packets may come over, beside UDP. host: where the switch listens. Where it listens on all its addresses, a
    job's data port is on all of them too, and answers each worker from the address that the worker connected to."""

    def __init__(
        self,
        ledger: Ledger,
        incarnation: int,
        tokens: Tokens | None,
        parent: Parent | None,
        fabrics: Fabrics,
        *,
        tagged: bool,
        host: str,
    ) -> None:
        self._ledger = ledger
        self._incarnation = incarnation
        self._tokens = tokens
        self._parent = parent
        self._fabrics = fabrics
        self._tagged = tagged
        self._listens_everywhere = _is_unspecified(host)

    def tenant(self, message: control_messages.Message) -> Tenant:
        """Who asks, whatever for; RefusedError for a token that is not known."""
        if self._tokens is None:
            return DEFAULT_TENANT
        token = message.get("token")
        if not isinstance(token, str):
            raise RefusedError("token", "this switch wants a token, and none came: set NETFOLD_TOKEN_FILE")
        tenant = self._tokens.find(token)
        if tenant is None:
            raise RefusedError("token", "the token of NETFOLD_TOKEN_FILE is not known here")
        return tenant

    def admit(
        self,
        message: control_messages.Message,
        writer: asyncio.StreamWriter,
        address: str,
        opened: Callable[[Job], None],
    ) -> tuple[Job, Member]:
        """The job that this worker joins, and its seat there. opened: called with a job that is new."""
        if message["type"] != "join":
            raise control_messages.ProtocolError(f"expected join, not {message['type']!r}")
        tenant = self.tenant(message)
        join = Join.parse(message)
        if not tenant.allows_job_name(join.label):
            raise RefusedError(
                "name",
                f"{tenant.name}'s jobs are called {' or '.join(tenant.names)}, not {join.label!r} (NETFOLD_JOB_NAME)",
            )
        job = self._ledger.jobs.get(join.name)
        if job is None:
            job = self._open(join, tenant, writer)
            self._ledger.add(job)
            opened(job)
        _check_same(job, join, tenant)
        number, child = _child(job, join.ranks.index(join.rank), join.switch)
        if number in job.members:
            raise RefusedError(
                "duplicate",
                f"rank {join.rank} of this job has joined before, from {job.members[number].address}: two processes "
                "were started with the same rank",
            )
        if job.started:
            raise RefusedError("under way", "this job is under way; a restarted worker must come with a new group")
        if join.fabric is None:
            # Its packets will come from where it speaks now, and from no other host.
            local = writer.get_extra_info("sockname")[0] if self._listens_everywhere else ""
            job.plane.set_worker_address(job.id, number, writer.get_extra_info("peername")[0], join.port, local)
        else:
            try:
                job.plane.set_worker_fabric_address(job.id, number, join.fabric.name, join.fabric.tag)
            except fabric.FabricError as error:
                raise RefusedError("fabric", f"rank {join.rank} is nowhere on the fabric: {error}") from None
        where = address if child.switch is None else join.endpoint or address
        member = job.members[number] = Member(child, job.ranks_of(child), writer, where)
        return job, member

    def _open(self, join: Join, tenant: Tenant, writer: asyncio.StreamWriter) -> Job:
        if join.encrypt and not self._tagged:
            raise RefusedError(
                "security",
                "the job's packets are to be encrypted, and this switch has no keys: start it with --token-file",
            )
        place = self._place(join)
        size = len(place.children)
        self._ledger.check_quota(tenant, size)
        most_bytes = self._ledger.limits.window_bytes
        window_bytes = most_bytes if join.window_bytes is None else min(join.window_bytes, most_bytes)
        job_id = self._ledger.draw_id()
        nonces = [secrets.randbits(64) for _ in range(size)]
        drawn = [packet_keys.draw_secret() for _ in range(size)] if self._tagged else []
        hello_keys = [packet_keys.hello_key(secret, job=job_id, worker=i) for i, secret in enumerate(drawn)]
        proofs = [] if join.fabric is None else _other_numbers(nonces)
        host = writer.get_extra_info("sockname")[0]
        plane = self._ledger.least_loaded_plane()
        port, provider, place_on_fabric = None, None, None
        try:
            if join.fabric is None:
                # Twice the window a worker: the kernel counts its own overhead in.
                place_host = _everywhere(host) if self._listens_everywhere else host
                port = plane.open(job_id, self._incarnation, place_host, nonces, hello_keys, 2 * window_bytes * size)
            else:
                provider = self._fabrics.name_of(join.fabric.provider)
                if provider is None:
                    raise RefusedError(
                        "fabric",
                        f"this switch takes packets over {self._fabrics}, and not over {join.over}: start it with "
                        "--fabric, or the job without that NETFOLD_TRANSPORT",
                    )
                place_on_fabric = plane.open_on_fabric(
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
        if place_on_fabric is not None:
            needs, free = place_on_fabric["buffer_bytes"], self._ledger.available(tenant)["memory_bytes"]
            if needs > free:
                plane.close(job_id)
                raise RefusedError(
                    "full",
                    f"this switch is full: buffers for packets over {join.over} take {needs / 2**20:.1f} MiB, and "
                    f"{free / 2**20:.1f} MiB are free (--memory); less in flight (NETFOLD_WINDOW_BYTES) needs less",
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
            ranks=join.ranks,
            paths=join.paths,
            position=place,
            plane=plane,
            link=None if place.parent is None or self._parent is None else Link(self._parent),
            port=port,
            provider=provider,
            fabric=place_on_fabric,
            nonces=nonces,
            proofs=proofs,
            secrets=drawn,
            result_secret=packet_keys.draw_secret(),
            encrypts=join.encrypt,
            buffer=buffer,
            window_bytes=window_bytes,
            deadline=min(join.timeout_s, MAX_ASSEMBLY_S),
            created=time.monotonic(),
        )

    def _place(self, join: Join) -> TreePosition:
        size, paths = len(join.ranks), join.paths
        if paths is None:
            return single_switch(size)
        if (
            not isinstance(paths, list)
            or len(paths) != size
            or not all(isinstance(path, list) and all(isinstance(each, int) for each in path) for path in paths)
        ):
            raise control_messages.ProtocolError("join with paths that are not a list of ids for each worker")
        try:
            place = tree_position(self._incarnation, paths)
        except ValueError as error:
            raise RefusedError("tree", str(error)) from None
        if place.parent is not None and self._parent is None:
            raise RefusedError("tree", "this switch has no parent (--parent), and the job has workers beyond it")
        return place


def _check_same(job: Job, join: Join, tenant: Tenant) -> None:
    """Raise RefusedError where this rank's job is not what the others said it is."""
    if job.tenant != tenant:
        raise RefusedError("token", "this job belongs to another token: all its ranks need the same")
    if job.over != join.over:
        raise RefusedError(
            "mismatch",
            f"rank {join.rank}'s packets come over {join.over}, others' over {job.over}: all ranks of a job need "
            "the same (NETFOLD_TRANSPORT)",
        )
    if job.encrypts != join.encrypt:
        raise RefusedError(
            "mismatch",
            f"rank {join.rank}'s packets are {'' if join.encrypt else 'not '}to be encrypted, and others' are"
            f"{' not' if join.encrypt else ''}: all ranks of a job need the same (NETFOLD_SECURITY)",
        )
    if len(job.ranks) != len(join.ranks):
        raise RefusedError(
            "mismatch", f"rank {join.rank} says that its job has {len(join.ranks)} ranks; others said {len(job.ranks)}"
        )
    if job.ranks != join.ranks:
        raise RefusedError(
            "mismatch",
            f"rank {join.rank} says that the ranks of its job are {listed(join.ranks)}; others said other ones",
        )
    if job.paths != join.paths:
        raise RefusedError(
            "mismatch", f"rank {join.rank} says that its job has another tree of switches than others said"
        )


def _is_unspecified(host: str) -> bool:
    """Whether `host` stands for all local addresses; a name does not."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _everywhere(local: str) -> str:
    """All local addresses of the family of `local`."""
    return "::" if ":" in local else "0.0.0.0"


def _other_numbers(nonces: Sequence[int]) -> list[int]:
    """As long as nonces, and each another number than its nonce."""
    return [nonce ^ (secrets.randbelow((1 << 64) - 1) + 1) for nonce in nonces]


def _ranks(message: control_messages.Message) -> tuple[int, ...]:
    ranks = message.get("ranks")
    if not isinstance(ranks, list) or not ranks or not all(isinstance(rank, int) and rank >= 0 for rank in ranks):
        raise control_messages.ProtocolError("join without the job's ranks")
    if len(set(ranks)) != len(ranks):
        raise control_messages.ProtocolError("join with a rank that is there twice")
    return tuple(ranks)


def _child(job: Job, worker: int, switch: object) -> tuple[int, Child]:
    """Who joins, with its number here: worker `worker`, or the switch of that id with it as the lowest below."""
    for number, child in enumerate(job.position.children):
        if child.name == worker and child.switch == switch:
            return number, child
    what = f"rank {job.ranks[worker]}" if switch is None else "a switch"
    raise RefusedError("tree", f"{what} joins here, and by the tree of this job it does not")
