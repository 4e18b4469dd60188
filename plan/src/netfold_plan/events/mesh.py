"""The places of a split's ranks on a cluster, and the links that their messages share. Pure.

Tensor ranks are next to each other, then data, then pipeline: rank = (stage * data + replica) * tensor + part.
"""

from __future__ import annotations

from netfold_plan.cluster import Cluster
from netfold_plan.events.resources import Uses
from netfold_plan.job import Split


class Mesh:
    """Lanes of a split on a cluster. A lane is the tensor ranks of one stage and replica.

    folded: one lane stands for all replicas of a stage, which do the same at the same time.
    contention: without contention every link is wide enough.
    capacity: of the links used so far, in devices that send at their full rate.
    """

    def __init__(self, cluster: Cluster, split: Split, *, folded: bool, contention: bool) -> None:
        self._cluster = cluster
        self._split = split
        self._contention = contention
        self.replicas = 1 if folded else split.data
        # A folded lane has the ranks of all its replicas.
        self._ranks_a_lane = split.tensor * (split.data // self.replicas)
        self._numbers: dict[tuple[str, int, int], int] = {}
        self.capacity: list[float] = []

    @property
    def lanes(self) -> int:
        return self._split.pipeline * self.replicas

    def lane_of(self, rank: int) -> int:
        return rank // self._ranks_a_lane

    def ranks(self, lane: int) -> range:
        return range(lane * self._ranks_a_lane, (lane + 1) * self._ranks_a_lane)

    def message(self, lane: int, other: int) -> Uses:
        """The links of a message from one lane to another: each rank sends to its counterpart, all at once."""
        if not self._contention:
            return ()
        tier = self._tier(self.ranks(lane)[0], self.ranks(other)[0])
        ports = [(self._link("out", lane, tier, 1.0), 1.0), (self._link("in", other, tier, 1.0), 1.0)]
        return (*ports, *self._uplinks("up", lane, tier), *self._uplinks("down", other, tier))

    def gradients(self, stage: int) -> Uses:
        """The links of a reduction among all replicas of a stage: each rank sends and receives at once."""
        if not self._contention or self._split.data == 1:
            return ()
        each = self._split.data * self._split.tensor
        tier = self._tier(stage * each, (stage + 1) * each - 1)
        taken: dict[int, float] = {}
        for lane in range(stage * self.replicas, (stage + 1) * self.replicas):
            for way, port in (("up", "out"), ("down", "in")):
                taken[self._link(port, lane, tier, 1.0)] = 1.0
                for link, part in self._uplinks(way, lane, tier):
                    taken[link] = taken.get(link, 0.0) + part
        return tuple(taken.items())

    def crowding(self, uses: Uses) -> float:
        """The factor by which a message with these links takes longer, when it has the links to itself."""
        return max((taken / self.capacity[link] for link, taken in uses), default=1.0)

    def _tier(self, rank: int, other: int) -> int:
        """The index of the innermost tier that joins two ranks."""
        tiers = self._cluster.tiers
        return next(index for index, tier in enumerate(tiers) if rank // tier.devices == other // tier.devices)

    def _uplinks(self, way: str, lane: int, tier: int) -> list[tuple[int, float]]:
        """The oversubscribed links above a lane's devices, each with the part that the lane takes."""
        ranks = self.ranks(lane)
        uses = []
        for index in range(1, tier + 1):
            inside, outside = self._cluster.tiers[index - 1], self._cluster.tiers[index]
            if outside.oversubscription > 1:
                capacity = inside.devices / outside.oversubscription
                link = self._link(way, ranks[0] // inside.devices, index, capacity)
                uses.append((link, float(min(len(ranks), inside.devices))))
        return uses

    def _link(self, way: str, place: int, tier: int, capacity: float) -> int:
        key = (way, place, tier)
        if key not in self._numbers:
            self._numbers[key] = len(self.capacity)
            self.capacity.append(capacity)
        return self._numbers[key]
