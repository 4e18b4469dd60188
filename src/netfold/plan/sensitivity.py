"""What more of one thing would buy: bandwidth, latency, arithmetic, memory. All else stays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from netfold.plan.cluster import Cluster, Tier
from netfold.plan.model import Layered, Measured, Model
from netfold.plan.search import Choice, SearchResult, describe_split, rank_by_time
from netfold.plan.step import predict


@dataclass(frozen=True)
class Gain:
    """what: `10x the bandwidth of InfiniBand HDR`. step_s: of the way that is best then; kept_s: of the way it is now.

    choice: the best way then. base_s: as it is now.
    """

    what: str
    base_s: float
    kept_s: float
    choice: Choice

    @property
    def step_s(self) -> float:
        return self.choice.prediction.step_s

    @property
    def factor(self) -> float:
        return self.base_s / self.step_s

    @property
    def buys(self) -> bool:
        """Anything that shows."""
        return self.factor >= 1.005

    def sentence(self) -> str:
        kept = self.base_s / self.kept_s
        if not self.buys:
            return f"{self.what} buys nothing"
        if self.factor < 1.005 * kept:
            return f"{self.what} buys {self.factor:.2f}x"
        now = f"; {kept:.2f}x as it is split now" if kept >= 1.005 else ""
        return f"{self.what} buys {self.factor:.2f}x, split as {describe_split(self.choice.job)}{now}"


def sensitivity(model: Model, cluster: Cluster, found: SearchResult) -> tuple[Gain, ...]:
    """Of the best way that was found, the largest gain first. Tiers that the job does not reach are left out."""
    best, shortlist = found.best, found.shortlist(cluster.device.usable_bytes)
    changes = _of_links(cluster, best.job.split.ranks)
    # A measured speed is what it is, whatever the device.
    if not (isinstance(model, Measured) or (isinstance(model, Layered) and model.measured)):
        changes = _of_device(cluster) + changes
    gains = [_gain(model, what, changed, shortlist) for what, changed in changes]
    if math.isfinite(cluster.device.memory_bytes):
        gains.append(_more_memory(cluster, found))
    return tuple(sorted(gains, key=lambda gain: -gain.factor))


def _of_device(cluster: Cluster) -> list[tuple[str, Cluster]]:
    device = cluster.device
    return [
        (
            "2x the arithmetic (FLOP/s)",
            replace(cluster, device=replace(device, flops={key: 2 * value for key, value in device.flops.items()})),
        ),
        (
            "2x the memory's bandwidth",
            replace(cluster, device=replace(device, memory_bytes_per_s=2 * device.memory_bytes_per_s)),
        ),
    ]


def _of_links(cluster: Cluster, ranks: int) -> list[tuple[str, Cluster]]:
    tiers, changes = cluster.tiers, []
    for index, tier in enumerate(tiers):
        if index and tiers[index - 1].devices >= ranks:
            break
        wide, quick = replace(tier, bytes_per_s=10 * tier.bytes_per_s), replace(tier, latency_s=tier.latency_s / 10)
        changes += [
            (f"10x the bandwidth of {tier.name}", replace(cluster, tiers=_with(tiers, index, wide))),
            (f"a tenth of the latency of {tier.name}", replace(cluster, tiers=_with(tiers, index, quick))),
        ]
        if tier.oversubscription > 1:
            full = replace(tier, oversubscription=1.0)
            changes.append((f"no oversubscription of {tier.name}", replace(cluster, tiers=_with(tiers, index, full))))
    return changes


def _with(tiers: Sequence[Tier], index: int, tier: Tier) -> tuple[Tier, ...]:
    return (*tiers[:index], tier, *tiers[index + 1 :])


def _gain(model: Model, what: str, changed: Cluster, shortlist: Sequence[Choice]) -> Gain:
    ways = [Choice(way.job, predict(model, changed, way.job)) for way in shortlist]
    best = min(ways, key=rank_by_time)
    return Gain(what, shortlist[0].prediction.step_s, ways[0].prediction.step_s, best)


def _more_memory(cluster: Cluster, found: SearchResult) -> Gain:
    base, roomy_bytes = found.best.prediction.step_s, cluster.device.memory_bytes + cluster.device.usable_bytes
    roomy = min((way for way in found.candidates if way.prediction.memory.total <= roomy_bytes), key=rank_by_time)
    return Gain("2x the memory", base, base, roomy)
