"""A job on this switch: its members, its grants and its state; and the refusal of a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from netfold._native.dataplane import DataPlane
from netfold.switch.bmv2 import Bmv2, PipelineError
from netfold.switch.parent import Link
from netfold.switch.tokens import Tenant
from netfold.switch.tree import TreePosition
from netfold.switch_protocol import control_messages, packet_keys
from netfold.switch_protocol.data_path import ReceiveBuffer, without_strict
from netfold.switch_protocol.job_tree import Contributor

# The largest rate that a worker may report.
MAX_BYTES_PER_S = 1e15
# Characters of a leaving member's reason.
MAX_REASON = 512


class RefusedError(Exception):
    """The switch refuses a worker or a job; the worker gets the text.

    kind: the reason as a short label, for counting.
    remedy: what the worker's user may try; "" where the reason says it.
    """

    def __init__(self, kind: str, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.kind = kind
        self.remedy = remedy


@dataclass
class Member:
    """A peer that joined the job: a rank, or a switch with the ranks below it."""

    number: int  # at this switch
    contributor: Contributor
    writer: asyncio.StreamWriter
    address: str  # of a rank: the peer of its connection; of a switch: the endpoint where it listens
    udp: tuple[str, int] | None  # host and port that its packets come from; None on a fabric
    payload_bytes: int = 0  # 0 until it is ready
    window: int | None = None  # of a switch: the most chunks that it can grant
    speaks_hardware: bool = False  # the hardware profile
    hardware: bool = False  # of a switch: it, or one below it, is a pipeline, so `payload_bytes` is fixed
    open_queries: int = 0  # `stragglers` queries of this member that have no reply yet
    asked: int = 0  # `stragglers` queries of this switch to this member that have no reply yet
    left: set[int] = field(default_factory=set)  # of a switch: ranks below it that it announced as left

    @property
    def is_switch(self) -> bool:
        return self.contributor.switch is not None

    @property
    def rank(self) -> int:
        return self.contributor.rank

    @property
    def who(self) -> str:
        return described([self.contributor])


@dataclass(frozen=True)
class Departure:
    """Ranks that left, to be announced to the job's other members.

    source: the member that is, or reported, the ranks; None for the parent.
    """

    ranks: tuple[int, ...]
    reason: str
    fault: int | None
    source: Member | None

    @classmethod
    def of(cls, ranks: tuple[int, ...], left: control_messages.Message, source: Member | None) -> Departure:
        """Return the departure that a switch's `left` message reports, of these ranks."""
        fault = left.get("fault")
        return cls(ranks, str(left.get("reason", ""))[:MAX_REASON], fault if type(fault) is int else None, source)


@dataclass
class Job:
    name: str  # a digest that only its ranks know
    label: str  # its name for people
    tenant: Tenant
    id: int
    tree: Any  # the levels from this switch to the root, as the workers sent them; None for a single switch
    position: TreePosition
    plane: DataPlane
    port: int | None  # the UDP data port; None on a fabric
    provider: str | None  # the fabric's provider, as in the switch's --fabric; None: UDP
    fabric: dict[str, Any] | None  # the endpoint on the fabric (DataPlane.open_on_fabric)
    nonces: list[int]  # by worker
    proofs: list[int]  # on a fabric: by worker, the number with which its hello is answered
    secrets: list[bytes]  # by worker; empty where packets carry no MAC
    result_secret: bytes
    encrypts: bool  # packets with values are encrypted, here and at the parent
    buffer: ReceiveBuffer | None  # None on a fabric
    window_bytes: int
    deadline: float  # of the assembly, in seconds from `created`
    created: float  # time.monotonic()
    members: dict[int, Member] = field(default_factory=dict)  # by number at this switch
    pipeline: Bmv2 | None = None  # that reduces for the job in place of `plane`, since it began
    hardware: bool = False  # a switch of its tree is a pipeline, as far as this switch knows
    link: Link | None = None  # to the parent
    parent_task: asyncio.Task[None] | None = None  # runs the job's TreeSession
    departures: list[Departure] = field(default_factory=list)  # that are not announced yet
    # stragglers.py: open queries to neighbours by serial, and what was found out lately.
    # None: the neighbour does not know.
    pending_queries: dict[int, asyncio.Future[list[int] | None]] = field(default_factory=dict)
    shared_queries: dict[Any, tuple[float, asyncio.Future[list[int] | None]]] = field(default_factory=dict)
    lookup: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))  # of a chunk in the data plane
    started: bool = False
    epoch: int = 0
    memory_bytes: int = 0
    slots: int = 0
    timer: asyncio.TimerHandle | None = None  # of the assembly
    # Rate of tensor bytes through this switch, as the lowest rank reports it. Only shown; None where unknown.
    capacity_bytes_per_s: float | None = None

    @property
    def size(self) -> int:
        """The number of members when complete: workers and switches that contribute to this switch."""
        return len(self.position.contributors)

    @property
    def title(self) -> str:
        """The part of its name that the log has: enough to tell jobs apart, too little to join one."""
        return self.name[:8]

    @property
    def log_fields(self) -> dict[str, object]:
        return {"job": self.title, "name": self.label or None, "tenant": self.tenant.name, "id": f"{self.id:08x}"}

    @property
    def provider_below(self) -> str | None:
        """The provider that packets really use, without `strict`; None for UDP."""
        return None if self.fabric is None else without_strict(self.fabric["provider"])

    @property
    def over(self) -> str:
        """The transport of its packets, as text."""
        return "UDP" if self.fabric is None else f"provider {self.provider_below}"

    @property
    def buffer_bytes(self) -> int:
        """Memory for packets in flight; 0 over UDP, where the kernel buffers them."""
        return 0 if self.fabric is None else int(self.fabric["buffer_bytes"])

    def counters(self) -> dict[str, Any] | None:
        """The job's counters; None where the data plane no longer has it. Waits for the data plane's thread."""
        counted: dict[str, Any] | None = self.plane.counters(self.id)
        return counted if counted is None else self.with_pipeline(counted)

    def with_pipeline(self, counted: dict[str, Any]) -> dict[str, Any]:
        """Add what the pipeline has counted to the counters of the data plane, which served the hellos."""
        if self.pipeline is None:
            return counted
        try:
            own = self.pipeline.counters(self.id)
        except PipelineError:  # the job's workers notice it themselves
            return counted
        drops = {
            kind: {reason: count + own[kind][reason] for reason, count in counted[kind].items()}
            for kind in ("drops", "parent_drops")
        }
        sent = own["results"] * self.size + own["results_resent"]
        return {**counted, **own, "results_sent": sent, **drops}

    def missing(self, chunk: int) -> list[int]:
        """The numbers of the members whose contribution to `chunk` has not come. Raises PipelineError."""
        if self.pipeline is not None:
            return self.pipeline.missing(self.id, chunk)
        return list(self.plane.missing(self.id, chunk))

    def data_address_of(self, number: int) -> dict[str, Any]:
        """The fields of `admitted` that tell a worker where to send its packets."""
        if self.fabric is None:
            return {"port": self.port}
        endpoint = {"name": self.fabric["name"], "packet_bytes": self.fabric["packet_bytes"]}
        return {"fabric": {**endpoint, "tag": self.fabric["tags"][number]}}

    def record_capacity(self, member: Member, bytes_per_s: object) -> None:
        """Take the rate of this switch that `member` measured.

        Raises ProtocolError where `member` is not the lowest rank or `bytes_per_s` is no rate.
        """
        if member.is_switch or member.contributor.worker != 0:
            raise control_messages.ProtocolError(
                f"bytes_per_s from {member.who}; only the job's lowest rank reports it"
            )
        if (
            not isinstance(bytes_per_s, (int, float))
            or isinstance(bytes_per_s, bool)
            or not 0 <= bytes_per_s <= MAX_BYTES_PER_S
        ):
            raise control_messages.ProtocolError(f"alive with bytes_per_s {str(bytes_per_s)[:80]!r}")
        self.capacity_bytes_per_s = float(bytes_per_s)

    def keys(self, epoch: int) -> tuple[list[bytes], bytes] | None:
        """The packet keys of `epoch`: one for each worker's contributions, and one for results; None without MACs."""
        if not self.secrets:
            return None
        own = [
            packet_keys.contribution_key(secret, job=self.id, epoch=epoch, worker=worker)
            for worker, secret in enumerate(self.secrets)
        ]
        return own, packet_keys.result_key(self.result_secret, job=self.id, epoch=epoch)


def record_left(known: set[int], message: control_messages.Message, most: int) -> tuple[int, ...]:
    """Add the ranks of a switch's `left` message to those that it announced before, at most `most` in all.

    Raises ProtocolError for a message without ranks, or with more.
    """
    ranks = message.get("ranks")
    if not isinstance(ranks, list) or not all(type(rank) is int and rank >= 0 for rank in ranks):
        raise control_messages.ProtocolError("left without ranks")
    if len(known.union(ranks)) > most:
        raise control_messages.ProtocolError(f"left of {len(known.union(ranks))} ranks, and it has {most}")
    known.update(ranks)
    return tuple(ranks)


def described(contributors: Sequence[Contributor]) -> str:
    """Contributors as they stand in a sentence: the ranks, then the switches, by the lowest rank below each."""
    ranks = [str(each.rank) for each in contributors if each.switch is None]
    switches = [
        f"the switch of rank {each.rank}" + (f" and {each.workers - 1} more" if each.workers > 1 else "")
        for each in contributors
        if each.switch is not None
    ]
    return ", ".join([*([f"rank {', '.join(ranks)}"] if ranks else []), *switches])


def labelled(contributor: Contributor) -> str:
    """A contributor as a field of the log and as a label of a metric."""
    return str(contributor.rank) if contributor.switch is None else f"leaf of {contributor.rank}"
