"""A job on this switch: who is in it, what was granted to it, and how far it has come. And how a worker is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from netfold._native.dataplane import DataPlane
from netfold.switch.parent import Link
from netfold.switch.tokens import Tenant
from netfold.switch.tree import Child, TreePosition
from netfold.switch_protocol import control_messages, packet_keys
from netfold.switch_protocol.data_path import ReceiveBuffer, without_strict

# A worker that says more is wrong about its switch.
MAX_BYTES_PER_S = 1e15


class RefusedError(Exception):
    """Said to the worker in its words; `kind` is the reason in one, for counting."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


@dataclass
class Member:
    """One that joined: a rank, or a switch with the ranks below it."""

    child: Child
    ranks: tuple[int, ...]
    writer: asyncio.StreamWriter
    address: str  # of the connection; of a switch: where it listens
    payload_bytes: int = 0
    window: int | None = None  # the most chunks that a switch can grant
    open_queries: int = 0  # of this member's, open

    @property
    def rank(self) -> int:
        return self.ranks[0]

    @property
    def who(self) -> str:
        return f"rank {self.rank}" if self.child.switch is None else f"the switch of rank {listed(self.ranks)}"


@dataclass
class Job:
    name: str  # a digest that only its ranks know
    label: str
    tenant: Tenant
    id: int
    ranks: tuple[int, ...]  # what its workers, by number, are called; of the whole tree
    paths: Any  # of its workers, as they said
    position: TreePosition
    plane: DataPlane
    port: int | None  # of UDP
    provider: str | None  # of the fabric that its packets go over, as the switch was told to serve it; None: UDP
    fabric: dict[str, Any] | None  # its place there (DataPlane.open_on_fabric)
    nonces: list[int]
    proofs: list[int]  # on a fabric: by worker, what its hello comes back with
    secrets: list[bytes]  # of workers, by number; empty where packets carry no tags
    result_secret: bytes
    encrypts: bool  # packets with values, here and at the parent
    buffer: ReceiveBuffer | None  # None on a fabric
    window_bytes: int
    deadline: float
    created: float
    members: dict[int, Member] = field(default_factory=dict)  # by number here
    link: Link | None = None  # to the parent
    parent_task: asyncio.Task[None] | None = None  # reads from it
    left: set[int] = field(default_factory=set)  # ranks of which all were told
    pending_queries: dict[int, asyncio.Future[list[int]]] = field(default_factory=dict)  # by serial: who misses what
    started: bool = False
    epoch: int = 0
    memory_bytes: int = 0
    slots: int = 0
    timer: asyncio.TimerHandle | None = None
    # Of tensor through this switch, as its lowest rank says; None where that does not know. It is shown, and no more.
    capacity_bytes_per_s: float | None = None

    @property
    def size(self) -> int:
        """Who contributes here."""
        return len(self.position.children)

    @property
    def log_fields(self) -> dict[str, object]:
        """Its fields in the log."""
        return {"job": self.name, "name": self.label or None, "tenant": self.tenant.name, "id": f"{self.id:08x}"}

    @property
    def provider_below(self) -> str | None:
        """The provider that its packets really go over; None for UDP."""
        return None if self.fabric is None else without_strict(self.fabric["provider"])

    @property
    def over(self) -> str:
        """What its packets go over, in words."""
        return "UDP" if self.fabric is None else f"provider {self.provider_below}"

    @property
    def buffer_bytes(self) -> int:
        """Of memory for packets on the way, which are the kernel's over UDP."""
        return 0 if self.fabric is None else int(self.fabric["buffer_bytes"])

    def data_address_of(self, number: int) -> dict[str, Any]:
        """What `admitted` says to a worker of where its packets go."""
        if self.fabric is None:
            return {"port": self.port}
        place = {"name": self.fabric["name"], "packet_bytes": self.fabric["packet_bytes"]}
        return {"fabric": {**place, "tag": self.fabric["tags"][number]}}

    def ranks_of(self, child: Child) -> tuple[int, ...]:
        return tuple(self.ranks[worker] for worker in child.workers)

    def record_capacity(self, member: Member, said: object) -> None:
        """Take what `member` says of this switch's rate; ProtocolError where it has no say, or `said` is no rate."""
        if member.child.switch is not None or member.rank != min(self.ranks):
            raise control_messages.ProtocolError(
                f"bytes_per_s from {member.who}, and only the job's lowest rank says it"
            )
        if not isinstance(said, (int, float)) or isinstance(said, bool) or not 0 <= said <= MAX_BYTES_PER_S:
            raise control_messages.ProtocolError(f"alive with bytes_per_s {str(said)[:80]!r}")
        self.capacity_bytes_per_s = float(said)

    def keys(self, epoch: int) -> tuple[list[bytes], bytes] | None:
        """Of its packets in this epoch, a worker each and the answers', None where they carry no tags."""
        if not self.secrets:
            return None
        own = [
            packet_keys.contribution_key(secret, job=self.id, epoch=epoch, worker=worker)
            for worker, secret in enumerate(self.secrets)
        ]
        return own, packet_keys.result_key(self.result_secret, job=self.id, epoch=epoch)


def listed(ranks: Sequence[int]) -> str:
    """For a sentence."""
    return ", ".join(map(str, ranks))


def labelled(ranks: Sequence[int]) -> str:
    """For the log: whom a contribution is from."""
    return "+".join(map(str, ranks))
