"""The same job on other clusters, or on its own cluster with another network between the nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from netfold_plan.cluster import Cluster, load_cluster
from netfold_plan.cluster.networks import networks, with_network
from netfold_plan.model import Model
from netfold_plan.search import PredictedJob, SearchResult, fastest
from netfold_plan.words import suggest

WHAT = ("network", "cluster")


@dataclass(frozen=True)
class Variant:
    """choice: the best split; None where no split fits or divides evenly, and then `why` has the reason.

    factor: the first variant's step time over this variant's; 0 where either is unknown.
    assumed: the aggregators that it has, as text.
    """

    name: str
    choice: PredictedJob | None
    why: str = ""
    factor: float = 0.0
    assumed: str = ""


def parse_comparison(text: str, cluster: Cluster, *, keep_device: bool = False) -> tuple[tuple[str, Cluster], ...]:
    """Named clusters from `network=tcp,efa` or `cluster=a,b`. keep_device: give them the device of `cluster`.

    Raises ValueError, in one sentence, for any other text.
    """
    what, equals, names = text.partition("=")
    each = [name.strip() for name in names.split(",") if name.strip()]
    if not equals or what not in WHAT:
        raise ValueError(f"--compare {text}: {suggest(what, WHAT)} (write network=tcp,in-network or cluster=a,b)")
    if not each:
        raise ValueError(f"--compare {text}: names nothing; write {what}=one,other")
    if what == "cluster":
        others = [(name, load_cluster(name, cluster.device if keep_device else None)) for name in each]
        return tuple((name, replace(other, device=cluster.device) if keep_device else other) for name, other in others)
    return tuple((name, with_network(cluster, name)) for name in each)


def compare(
    found: SearchResult, model: Model, cluster: Cluster, others: tuple[tuple[str, Cluster], ...]
) -> tuple[Variant, ...]:
    """The cluster as it is with its best split, then each other cluster with its own best split.

    The splits that are tried elsewhere: the fastest of each mesh and the fastest of all. Where another network
    aggregates and the cluster's own does not, the job uses that; where both do, the job's own setting decides.
    """
    base = found.best
    variants = [Variant("as it is", base, factor=1.0)]
    for name, other in others:
        wanted = name in networks() and networks()[name].aggregates
        in_network = other.aggregates and (base.job.in_network or not cluster.aggregates or wanted)
        try:
            best = _best(found, model, other, in_network)
        except ValueError as error:
            variants.append(Variant(name, None, str(error)))
            continue
        factor, assumed = base.prediction.step_s / best.prediction.step_s, _aggregators(other, best.job.split.ranks)
        variants.append(Variant(name, best, factor=factor, assumed=assumed))
    return tuple(variants)


def _aggregators(cluster: Cluster, ranks: int) -> str:
    hosts = -(-ranks // cluster.host_devices)
    return "; ".join(
        replace(each, cores=each.needed_cores(cluster.host_devices * tier.bytes_per_s, hosts)).text()
        for tier in cluster.tiers
        for each in tier.aggregators
    )


def _best(found: SearchResult, model: Model, cluster: Cluster, in_network: bool) -> PredictedJob:
    """Raises ValueError, in one sentence, where no split fits into the memory that the device has for tensors."""
    device, least = cluster.device, found.least.prediction
    # The memory of a measured model is unknown, and every split fits.
    shortlist = found.shortlist(device.usable_bytes if math.isfinite(least.memory_bytes) else math.inf)
    if not shortlist:
        has, usable, needed = (
            f"{size / 2**30:.1f} GB" for size in (device.memory_bytes, device.usable_bytes, least.memory.total)
        )
        raise ValueError(f"does not fit: {device.name} has {has}, {usable} of it for tensors, and needs {needed}")
    return fastest(model, cluster, [replace(choice.job, in_network=in_network) for choice in shortlist])
