"""What more of one resource would gain: bandwidth, latency, arithmetic, memory. All else stays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from netfold.plan.cluster import Cluster
from netfold.plan.model import Layered, Measured, Model
from netfold.plan.search import PredictedJob, SearchResult, describe_split, fastest, rank_by_time
from netfold.plan.step import predict


@dataclass(frozen=True)
class Gain:
    """what: such as `10x the bandwidth of InfiniBand HDR`. base_s: a step as it is now.

    kept_s: a step with the present split after the change. choice: the best split after the change.
    """

    what: str
    base_s: float
    kept_s: float
    choice: PredictedJob

    @property
    def step_s(self) -> float:
        return self.choice.prediction.step_s

    @property
    def factor(self) -> float:
        return self.base_s / self.step_s

    @property
    def buys(self) -> bool:
        """Whether the gain is at least 0.5%."""
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
    """Gains over the best split that was found, the largest first. Tiers that the job does not reach are left out."""
    best, shortlist = found.best, found.shortlist(cluster.device.usable_bytes)
    changes = _link_changes(cluster, best.job.split.ranks)
    # A measured speed does not depend on the device.
    if not (isinstance(model, Measured) or (isinstance(model, Layered) and model.measured)):
        changes = _device_changes(cluster) + changes
    gains = [_gain(model, what, changed, shortlist) for what, changed in changes]
    if math.isfinite(cluster.device.memory_bytes):
        gains.append(_more_memory(cluster, found))
    return tuple(sorted(gains, key=lambda gain: -gain.factor))


def _device_changes(cluster: Cluster) -> list[tuple[str, Cluster]]:
    device = cluster.device
    quick = replace(device, flops={key: 2 * value for key, value in device.flops.items()})
    wide = replace(device, memory_bytes_per_s=2 * device.memory_bytes_per_s)
    return [
        ("2x the arithmetic (FLOP/s)", replace(cluster, device=quick)),
        ("2x the memory's bandwidth", replace(cluster, device=wide)),
    ]


def _link_changes(cluster: Cluster, ranks: int) -> list[tuple[str, Cluster]]:
    changes = []
    for index, tier in enumerate(cluster.tiers):
        if index and cluster.tiers[index - 1].devices >= ranks:
            break
        changed = {
            f"10x the bandwidth of {tier.name}": replace(tier, bytes_per_s=10 * tier.bytes_per_s),
            f"a tenth of the latency of {tier.name}": replace(tier, latency_s=tier.latency_s / 10),
        }
        if tier.oversubscription > 1:
            changed[f"no oversubscription of {tier.name}"] = replace(tier, oversubscription=1.0)
        changes += [(what, cluster.with_tier(tier, other)) for what, other in changed.items()]
    return changes


def _gain(model: Model, what: str, changed: Cluster, shortlist: Sequence[PredictedJob]) -> Gain:
    best = fastest(model, changed, [choice.job for choice in shortlist])
    kept_s = predict(model, changed, shortlist[0].job).step_s
    return Gain(what, shortlist[0].prediction.step_s, kept_s, best)


def _more_memory(cluster: Cluster, found: SearchResult) -> Gain:
    base_s, doubled_bytes = found.best.prediction.step_s, cluster.device.memory_bytes + cluster.device.usable_bytes
    fitting = (choice for choice in found.candidates if choice.prediction.memory.total <= doubled_bytes)
    return Gain("2x the memory", base_s, base_s, min(fitting, key=rank_by_time))
