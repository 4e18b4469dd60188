"""The ranks that share a host's memory, and the links between hosts."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Link:
    """The latency and rate between two ranks."""

    latency_s: float  # of one small message, from one rank's call to the other's
    bytes_per_s: float  # of tensors, one way

    def text(self) -> str:
        return f"{self.latency_s * 1e6:.3g} us, {self.bytes_per_s / 1e6:.3g} MB/s"


@dataclass(frozen=True)
class Links:
    """The cost model's parameters of a group."""

    network: Link
    """TCP between two ranks."""
    memory: Link
    """A host's shared memory: latency_s of one synchronisation of its ranks, bytes_per_s of all its ranks together."""
    reduce_bytes_per_s: float
    """Contributions that one rank reduces."""
    message_s: float
    """Host time of one more message in the same step."""
    crowding: float
    """Part of a port's rate lost for every further rank that sends to the port at the same time."""
    restarts: float
    """Part of the rate lost if every step has another partner, so that connections start and stop."""
    measured: bool
    """A probe measured latency and rates; else all values are built in."""
    switches: tuple[float, ...] = ()
    """Of each switch: measured bytes of tensor a second that it returns while all workers send at once.

    Empty if not measured: then each switch counts as a host with a link like a rank's.
    """

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Links:
        links = {"network": Link(**data["network"]), "memory": Link(**data["memory"])}
        return cls(**data | links | {"switches": tuple(data["switches"])})

    def text(self) -> str:
        return f"{'measured' if self.measured else 'assumed'}: {self.network.text()}"


# Gigabit Ethernet through a switch: 1448 of 1538 bytes on the wire are payload. The memory of a small server.
# crowding, restarts: measured with four hosts in the rack at 1 Gbit/s, 16 MB, against rings
# (docs/explanation/algorithms.md).
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
    """The placement of a group's ranks on hosts."""

    nodes: tuple[int, ...]  # a number for each rank; ranks with one number share memory

    @classmethod
    def apart(cls, ranks: int) -> Topology:
        """Place every rank on its own host."""
        return cls(tuple(range(ranks)))

    @classmethod
    def even(cls, ranks: int, hosts: int) -> Topology:
        """Place ranks on hosts as launchers do: fill one host after the other."""
        if not 1 <= hosts <= ranks:
            raise ValueError(f"{ranks} ranks cannot be on {hosts} hosts; 1 to {ranks} hosts are possible")
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
        first: dict[int, int] = {}
        for rank, node in enumerate(self.nodes):
            first.setdefault(node, rank)
        return tuple(first.values())

    @property
    def has_levels(self) -> bool:
        """Whether there are several hosts, and several ranks on one of them."""
        return 1 < self.node_count < self.ranks

    @cached_property
    def most_on_a_node(self) -> int:
        return max(Counter(self.nodes).values())
