"""The same job elsewhere: on other clusters, or on its own with another network between the nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from netfold.plan.cluster import Cluster, load_cluster
from netfold.plan.cluster.networks import networks, with_network
from netfold.plan.model import Model
from netfold.plan.search import Choice, SearchResult, rank_by_time
from netfold.plan.step import predict
from netfold.plan.words import suggest

WHAT = ("network", "cluster")


@dataclass(frozen=True)
class Variant:
    """choice: the best way there; None where none fits or comes out even, and then `why` says so.

    factor: the first variant's step time over this one's; 0 where either is not known.
    """

    name: str
    cluster: Cluster
    choice: Choice | None
    why: str = ""
    factor: float = 0.0


def parse_comparison(text: str, cluster: Cluster, *, keep_device: bool = False) -> tuple[tuple[str, Cluster], ...]:
    """`network=tcp,efa` or `cluster=a,b`, as named clusters; keep_device: with the device of `cluster`. Raises
    ValueError, in a sentence, for anything else.
    """
    what, equals, names = text.partition("=")
    each = [name.strip() for name in names.split(",") if name.strip()]
    if not equals or what not in WHAT:
        raise ValueError(f"--compare {text}: {suggest(what, WHAT)}; write network=tcp,in-network or cluster=a,b")
    if not each:
        raise ValueError(f"--compare {text}: names nothing; write {what}=one,other")
    if what == "cluster":
        others = [(name, load_cluster(name, cluster.device if keep_device else None)) for name in each]
        return tuple((name, replace(other, device=cluster.device) if keep_device else other) for name, other in others)
    return tuple((name, with_network(cluster, name)) for name in each)


def compare(
    found: SearchResult, model: Model, cluster: Cluster, others: tuple[tuple[str, Cluster], ...]
) -> tuple[Variant, ...]:
    """The cluster as it is, by its best way, then each other, split as is best there.

    Ways that are tried elsewhere: of those that were found, the fastest of each mesh and the fastest of all. A network
    that aggregates is used for it where the cluster's own does not; where both do, as the job says.
    """
    base = found.best
    variants = [Variant("as it is", cluster, base, factor=1.0)]
    for name, other in others:
        asked = name in networks() and networks()[name].aggregates
        in_network = other.aggregates and (base.job.in_network or not cluster.aggregates or bool(asked))
        try:
            best = _best(found, model, other, in_network)
        except ValueError as error:
            variants.append(Variant(name, other, None, str(error)))
            continue
        variants.append(Variant(name, other, best, factor=base.prediction.step_s / best.prediction.step_s))
    return tuple(variants)


def _best(found: SearchResult, model: Model, cluster: Cluster, in_network: bool) -> Choice:
    """Raises ValueError, in a sentence, where no way fits beside what the device keeps from tensors."""
    device = cluster.device
    # Of what was measured memory is not known, and all of it fits.
    known = math.isfinite(found.least.prediction.memory_bytes)
    shortlist = found.shortlist(device.usable_bytes if known else math.inf)
    jobs = [replace(choice.job, in_network=in_network) for choice in shortlist]
    ways = [Choice(job, predict(model, cluster, job)) for job in jobs]
    if not ways:
        there, left, least = (
            f"{size / 2**30:.1f} GB"
            for size in (device.memory_bytes, device.usable_bytes, found.least.prediction.memory.total)
        )
        raise ValueError(
            f"does not fit: {device.name} has {there}, {left} of them for tensors, and {least} are needed at least"
        )
    return min(ways, key=rank_by_time)
