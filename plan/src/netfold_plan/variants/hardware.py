"""The gain from more hardware, all else as it is: more bandwidth, arithmetic or memory, or one more aggregator.

An aggregator is a spare host, or a Linux box with one port per worker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from netfold_plan.cluster import BOX, SPARE_HOST, Aggregator, Cluster
from netfold_plan.model import Layered, Measured, Model
from netfold_plan.search import PredictedJob, SearchResult, describe_split, fastest, rank_by_time
from netfold_plan.step import predict

# A box has at most so many ports: eight cards of four.
MOST_PORTS = 32


@dataclass(frozen=True)
class _Change:
    """what: the change, as text. base_s: a step as it is now. choice: the best split after the change."""

    what: str
    base_s: float
    choice: PredictedJob

    @property
    def step_s(self) -> float:
        return self.choice.prediction.step_s


@dataclass(frozen=True)
class Gain(_Change):
    """More of a resource, such as `10x the bandwidth of InfiniBand HDR`.

    kept_s: a step with the present split after the change.
    """

    kept_s: float

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


@dataclass(frozen=True)
class AggregatorGain(_Change):
    """One more aggregator. c: its link's rate over a worker's. cores: that aggregate."""

    c: float
    cores: int

    @property
    def saved(self) -> float:
        """The part of a step's time that is saved."""
        return max(0.0, 1 - self.step_s / self.base_s)

    @property
    def saves(self) -> bool:
        """Whether the saving is at least 0.5%."""
        return self.saved >= 0.005


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


def aggregator_gains(model: Model, cluster: Cluster, found: SearchResult) -> tuple[AggregatorGain, ...]:
    """Gains over the best split that was found.

    Empty where its ranks are inside one host, where replicas exchange no gradients, or where the switches aggregate.
    """
    best = found.best
    ranks = best.job.split.ranks
    tier = next((tier for tier in cluster.tiers if tier.devices >= ranks), cluster.tiers[-1])
    hosts = -(-ranks // cluster.host_devices)
    if hosts < 2 or best.job.split.data == 1 or tier.in_network:
        return ()
    kinds = [("one spare host with a link like a worker's", SPARE_HOST, 1.0)]
    if hosts <= MOST_PORTS:
        kinds.append(("a Linux box with a port per worker", BOX, float(hosts)))
    jobs = [replace(choice.job, in_network=True) for choice in found.shortlist(cluster.device.usable_bytes)]
    gains = []
    for what, host, c in kinds:
        host = replace(host, cores=0)
        cores = host.needed_cores(cluster.host_devices * tier.bytes_per_s, hosts)
        more = cluster.with_tier(tier, replace(tier, aggregators=(*tier.aggregators, host)))
        gains.append(AggregatorGain(what, best.prediction.step_s, fastest(model, more, jobs), c, cores))
    return tuple(gains)


def useless_aggregators(cluster: Cluster, ranks: int) -> list[Aggregator]:
    """Aggregators on workers' own hosts whose links have no rate left to aggregate with."""
    hosts = -(-ranks // cluster.host_devices)
    return [
        each
        for tier in cluster.tiers
        for each in tier.aggregators
        if each.worker and not each.gives(cluster.host_devices * tier.bytes_per_s, hosts)
    ]


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
    return Gain(what, shortlist[0].prediction.step_s, best, kept_s)


def _more_memory(cluster: Cluster, found: SearchResult) -> Gain:
    base_s, doubled_bytes = found.best.prediction.step_s, cluster.device.memory_bytes + cluster.device.usable_bytes
    fitting = (choice for choice in found.candidates if choice.prediction.memory.total <= doubled_bytes)
    return Gain("2x the memory", base_s, min(fitting, key=rank_by_time), base_s)
