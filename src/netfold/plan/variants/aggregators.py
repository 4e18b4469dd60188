"""What one more aggregator would gain: a spare host, or a Linux box with one port per worker. All else stays."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from netfold.plan.cluster import BOX, SPARE_HOST, Aggregator, Cluster
from netfold.plan.model import Model
from netfold.plan.search import PredictedJob, SearchResult, fastest

# A small server aggregates with at most so many cores. A box has at most so many ports: eight cards of four.
MOST_CORES, MOST_PORTS = 16, 32


@dataclass(frozen=True)
class AggregatorGain:
    """what: the aggregator, as text. c: its link's rate over a worker's. cores: that aggregate.

    base_s: a step as it is now. choice: the best split with the aggregator.
    """

    what: str
    c: float
    cores: int
    base_s: float
    choice: PredictedJob

    @property
    def step_s(self) -> float:
        return self.choice.prediction.step_s

    @property
    def saved(self) -> float:
        """The part of a step's time that is saved."""
        return max(0.0, 1 - self.step_s / self.base_s)

    @property
    def saves(self) -> bool:
        """Whether the saving is at least 0.5%."""
        return self.saved >= 0.005


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
        # As many cores as the link needs.
        link_bytes_per_s = host.link_bytes_per_s(cluster.host_devices * tier.bytes_per_s, hosts)
        host = replace(host, cores=min(MOST_CORES, math.ceil(link_bytes_per_s / host.core_bytes_per_s)))
        more = cluster.with_tier(tier, replace(tier, aggregators=(*tier.aggregators, host)))
        gains.append(AggregatorGain(what, c, host.cores, best.prediction.step_s, fastest(model, more, jobs)))
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
