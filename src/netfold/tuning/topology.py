"""Which ranks share a host's memory, and what joins those that do not."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Link:
    """latency_s: of one small message, from one rank's call to the other's; bytes_per_s: of tensors, one way."""

    latency_s: float
    bytes_per_s: float

    def text(self) -> str:
        return f"{self.latency_s * 1e6:.3g} us, {self.bytes_per_s / 1e6:.3g} MB/s"


@dataclass(frozen=True)
class Links:
    """What the cost model knows of a group's world.

    network: TCP between two ranks. memory: a host's shared memory, latency_s of one synchronisation of the ranks there,
    bytes_per_s of all of them together. reduce_bytes_per_s: contributions folded by one rank. message_s: what one more
    message in the same step costs its host. crowding: the part of a port's rate that every further rank costs which
    sends to it at the same time. restarts: the part that is lost where every step has another partner, so that
    connections start and stop. measured: latency and rates by a probe; else all of it is built in. switches: of each,
    bytes of tensor a second that it gives back while all workers send at once, as measured; empty where that is not
    known, and each is taken for a host with a link like everybody's.
    """

    network: Link
    memory: Link
    reduce_bytes_per_s: float
    message_s: float
    crowding: float
    restarts: float
    measured: bool
    switches: tuple[float, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Links:
        links = {"network": Link(**data["network"]), "memory": Link(**data["memory"])}
        return cls(**data | links | {"switches": tuple(data["switches"])})

    def text(self) -> str:
        return f"{'measured' if self.measured else 'assumed'}: {self.network.text()}"


# Gigabit Ethernet through a switch: 1448 bytes of 1538 on the wire are the tensor's. The memory of a small server.
# crowding, restarts: four hosts in the rack at 1 Gbit/s, 16 MB, against rings (docs/explanation/algorithms.md).
DEFAULT_LINKS = Links(
    network=Link(latency_s=60e-6, bytes_per_s=1448 / 1538 * 125e6),
    memory=Link(latency_s=3e-6, bytes_per_s=12e9),
    reduce_bytes_per_s=4e9,
    message_s=4e-6,
    crowding=0.06,
    restarts=0.04,
    measured=False,
)


@dataclass(frozen=True)
class Topology:
    """nodes: a number for each rank; ranks of one number share memory."""

    nodes: tuple[int, ...]

    @classmethod
    def apart(cls, ranks: int) -> Topology:
        """Every rank on a host of its own."""
        return cls(tuple(range(ranks)))

    @classmethod
    def even(cls, ranks: int, hosts: int) -> Topology:
        """Ranks spread over hosts as launchers do: the first hosts full, one after the other."""
        if not 1 <= hosts <= ranks:
            raise ValueError(f"{ranks} ranks cannot be on {hosts} hosts; one host a rank at most, one at least")
        return cls(tuple(rank * hosts // ranks for rank in range(ranks)))

    @property
    def ranks(self) -> int:
        return len(self.nodes)

    @cached_property
    def node_count(self) -> int:
        return len(set(self.nodes))

    @cached_property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of every host, ascending."""
        return tuple(rank for rank, node in enumerate(self.nodes) if self.nodes.index(node) == rank)

    @property
    def has_levels(self) -> bool:
        """Several hosts, and several ranks on one of them."""
        return 1 < self.node_count < self.ranks

    @cached_property
    def most_on_a_node(self) -> int:
        return max(Counter(self.nodes).values())
