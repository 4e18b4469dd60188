"""What one more aggregator would buy: a spare host, or a Linux box with a port a worker. All else stays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from netfold.plan.cluster import BOX, SPARE_HOST, Aggregator, Cluster, Tier
from netfold.plan.model import Model
from netfold.plan.search import Choice, SearchResult, rank_by_time
from netfold.plan.step import predict

# Cores that an offered host adds with, at most: those of a small server. Ports of a box, at most: eight cards of four.
MOST_CORES, MOST_PORTS = 16, 32


@dataclass(frozen=True)
class AggregatorGain:
    """what: in words. c: its link over a worker's. cores: that add. base_s: a step as it is now.

    choice: the best way to split with it.
    """

    what: str
    c: float
    cores: int
    base_s: float
    choice: Choice

    @property
    def step_s(self) -> float:
        return self.choice.prediction.step_s

    @property
    def saved(self) -> float:
        """Of a step's time, from 0 to 1."""
        return max(0.0, 1 - self.step_s / self.base_s)

    @property
    def saves(self) -> bool:
        """Anything that shows."""
        return self.saved >= 0.005


def aggregator_gains(model: Model, cluster: Cluster, found: SearchResult) -> tuple[AggregatorGain, ...]:
    """Of the best way that was found; none where its ranks are inside one host, where no gradients travel between
    replicas, or where the switches on the way add themselves.
    """
    best = found.best
    index = next((at for at, tier in enumerate(cluster.tiers) if tier.devices >= best.job.split.ranks), -1)
    tier = cluster.tiers[index]
    a_host = cluster.node if len(cluster.tiers) > 1 else 1
    hosts = -(-best.job.split.ranks // a_host)
    if hosts < 2 or best.job.split.data == 1 or tier.in_network:
        return ()
    shortlist = found.shortlist(cluster.device.usable_bytes)
    kinds = [("one spare host with a link like a worker's", SPARE_HOST, 1.0)]
    if hosts <= MOST_PORTS:
        kinds.append(("a Linux box with a port a worker", BOX, float(hosts)))
    made = []
    for what, host, c in kinds:
        host = _with_cores(host, a_host * tier.bytes_per_s, hosts)
        there = _with(cluster, tier, host)
        ways = [replace(way.job, in_network=True) for way in shortlist]
        choice = min((Choice(job, predict(model, there, job)) for job in ways), key=rank_by_time)
        made.append(AggregatorGain(what, c, host.cores, best.prediction.step_s, choice))
    return tuple(made)


def idle_workers(cluster: Cluster, ranks: int) -> Sequence[Aggregator]:
    """Aggregators on workers' own hosts that can take nothing, since their link has nothing left."""
    a_host = cluster.node if len(cluster.tiers) > 1 else 1
    hosts = -(-ranks // a_host)
    return [
        each
        for tier in cluster.tiers
        for each in tier.aggregators
        if each.worker and not each.gives(a_host * tier.bytes_per_s, hosts)
    ]


def _with_cores(host: Aggregator, worker_bytes_per_s: float, hosts: int) -> Aggregator:
    """As many cores as its link needs, and MOST_CORES at most."""
    link = host.link_bytes_per_s(worker_bytes_per_s, hosts)
    return replace(host, cores=min(MOST_CORES, math.ceil(link / host.core_bytes_per_s)))


def _with(cluster: Cluster, tier: Tier, host: Aggregator) -> Cluster:
    more = replace(tier, aggregators=(*tier.aggregators, host))
    return replace(cluster, tiers=tuple(more if each is tier else each for each in cluster.tiers))
