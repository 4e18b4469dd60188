"""How long ranks of a cluster talk: the formulas of netfold.tuning.cost, with the links that a group's ranks have."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from netfold.plan.cluster import Cluster, Tier
from netfold.plan.step.constants import Constants
from netfold.tuning.cost import HALVES, predict
from netfold.tuning.topology import Link, Links, Topology


@dataclass(frozen=True)
class Group:
    """`ranks` ranks, each `stride` devices from the one before."""

    ranks: int
    stride: int = 1

    def inside(self, tier: Tier) -> int:
        """How many of them one instance of a tier has."""
        return min(self.ranks, max(1, tier.devices // self.stride))


@lru_cache(maxsize=65536)
def collective_s(
    operation: str,
    size_bytes: float,
    group: Group,
    cluster: Cluster,
    constants: Constants,
    in_network: bool = False,
    one_ring: bool = False,
    wire: str = "f32",
    alongside: int = 0,
) -> float:
    """Seconds. The cheapest of: rings through all, as many as leave a node together; rings inside and between nodes; a
    reduction inside the network, in a node and between nodes, where asked for and the tiers that it crosses can; a
    reduction by aggregators, all of it or a part with a ring beside it. In an all_to_all every rank sends to every
    other, and leaves its node by its own adapter.

    one_ring: a single ring through all, which leaves each node by one adapter. wire: what f32 travels as.
    alongside: how many groups, this one and those on other hosts, use the cluster's aggregators at the same time; 0:
    this one does not.
    """
    if group.ranks == 1 or size_bytes == 0:
        return 0.0
    if wire in HALVES and operation == "all_reduce":
        size_bytes /= 2
    copied = size_bytes / (cluster.device.copy_bytes_per_s or constants.copy_bytes_per_s)
    if one_ring:
        seconds = predict(operation, "ring", size_bytes, _apart(group.ranks), _links(group, cluster, constants, True))
    else:
        seconds = min(_ways(operation, size_bytes, group, cluster, constants, in_network, alongside))
    return constants.collective_s + copied + seconds


def _ways(
    operation: str,
    size_bytes: float,
    group: Group,
    cluster: Cluster,
    constants: Constants,
    in_network: bool,
    alongside: int,
) -> list[float]:
    if operation == "all_to_all":
        links = _links_of_pairs(group, cluster, constants)
        return [predict(operation, "pairwise", size_bytes, _apart(group.ranks), links)]
    inner = cluster.tiers[0]
    inside = group.inside(inner)
    ways = [_along(operation, "ring", size_bytes, group, cluster, constants)]
    if operation != "all_reduce":
        return ways
    if inside == group.ranks or inside == 1:
        if not in_network:
            return ways
        return [
            *ways,
            *_through_switches(size_bytes, group, cluster, constants),
            *_by_aggregators(size_bytes, group, cluster, constants, alongside),
        ]
    nodes = Group(-(-group.ranks // inside), max(group.stride, inner.devices))
    within = Group(inside, group.stride)
    around = sum(
        _along(each, "ring", size_bytes, within, cluster, constants) for each in ("reduce_scatter", "all_gather")
    )
    part = size_bytes / inside
    between = [_along("all_reduce", name, part, nodes, cluster, constants) for name in ("ring", "tree")]
    if in_network:
        # Parts of the tensor stay in between: what is reduced in a node has left it before its sum comes back.
        around = min(around, *_through_switches(size_bytes, within, cluster, constants), float("inf"))
        between += _through_switches(part, nodes, cluster, constants)
        between += _by_aggregators(part, nodes, cluster, constants, alongside)
    ways.append(around + min(between))
    return ways


def _through_switches(size_bytes: float, group: Group, cluster: Cluster, constants: Constants) -> list[float]:
    """Seconds of an all_reduce that the tiers on its way make; none where one of them cannot."""
    crossed = _crossed(group, cluster)
    if not all(tier.in_network for tier in crossed):
        return []
    if crossed[-1].nvls:
        # Each rank loads the sum of its part, and stores it to all: a part more each way than all of the tensor.
        size_bytes *= 1 + 1 / group.ranks
    below = next((tier.devices for tier in reversed(cluster.tiers) if tier.devices < crossed[-1].devices), 1)
    joined = -(-group.ranks * group.stride // below)
    links = _links(group, cluster, constants)
    network = replace(links.network, latency_s=crossed[-1].way_up_s(joined))
    # A switch with a port a worker.
    links = replace(links, network=network, switches=(network.bytes_per_s,))
    return [predict("all_reduce", "in_network", size_bytes, _apart(group.ranks), links, switch=1)]


def _by_aggregators(
    size_bytes: float, group: Group, cluster: Cluster, constants: Constants, alongside: int
) -> list[float]:
    """Seconds of an all_reduce among ranks of a host each, by the aggregators of the outermost tier on its way: of all
    of it, and of a part with a ring beside it; none where there is nobody to add it up.

    Between two ranks stand `stride` devices, whose own groups send at the same time.
    """
    tier = _crossed(group, cluster)[-1]
    a_host = cluster.node if len(cluster.tiers) > 1 else 1
    devices = group.ranks * group.stride * alongside
    hosts = -(-devices // a_host)
    if not tier.aggregators or hosts < 2:
        return []
    host_bytes_per_s = a_host * constants.network_part * tier.loaded_bytes_per_s
    given = sum(each.gives(host_bytes_per_s, hosts) for each in tier.aggregators) / a_host
    if not given:
        return []
    links = replace(_links(group, cluster, constants), switches=(given,))
    names = ("in_network", "split") if group.ranks > 2 else ("in_network",)
    return [predict("all_reduce", name, size_bytes, _apart(group.ranks), links, switch=1) for name in names]


def _crossed(group: Group, cluster: Cluster) -> list[Tier]:
    """The tiers that messages between a group's ranks go through."""
    reach = group.ranks * group.stride
    outermost = next((index for index, tier in enumerate(cluster.tiers) if tier.devices >= reach), -1)
    innermost = next((index for index, tier in enumerate(cluster.tiers) if tier.devices > group.stride), -1)
    return list(cluster.tiers[innermost:][: outermost - innermost + 1] if outermost >= 0 else cluster.tiers[innermost:])


def _along(
    operation: str, algorithm: str, size_bytes: float, group: Group, cluster: Cluster, constants: Constants
) -> float:
    if group.ranks == 1:
        return 0.0
    return predict(operation, algorithm, size_bytes, _apart(group.ranks), _links(group, cluster, constants))


@lru_cache(maxsize=1024)
def _apart(ranks: int) -> Topology:
    return Topology.apart(ranks)


@lru_cache(maxsize=4096)
def _links(group: Group, cluster: Cluster, constants: Constants, one_ring: bool = False) -> Links:
    """What rings through the group are bound by: at each tier as many ranks leave together as are inside of it."""
    rate, latency, inside = float("inf"), 0.0, 1
    for tier in cluster.tiers:
        if group.inside(tier) == inside and inside < group.ranks and tier is not cluster.tiers[-1]:
            continue
        if inside >= group.ranks:
            break
        part = constants.network_part if tier is not cluster.tiers[0] else 1.0
        rate = min(rate, (1 if one_ring else inside) * part * tier.busy_bytes_per_s)
        # Of all hops, those that cross this tier and none outside.
        joined = group.inside(tier)
        hops = group.ranks / inside - (group.ranks / joined if joined < group.ranks else 0)
        latency += tier.latency_s * hops / group.ranks
        inside = joined
    return _alone(latency, rate)


@lru_cache(maxsize=4096)
def _links_of_pairs(group: Group, cluster: Cluster, constants: Constants) -> Links:
    """What ranks that each send to every other are bound by: each leaves a tier by its own adapter.

    Of n bytes a rank, n (P-i)/P go to ranks that the tier's instances inside, of i ranks each, do not have; the tier
    carries these, all that goes further out among them. The rate is the one at which n (P-1)/P take as long as the
    busiest tier's bytes do; the latency is the mean over a rank's partners.
    """
    others, inside = group.ranks - 1, 1
    rate, latency = float("inf"), 0.0
    for tier in cluster.tiers:
        joined = group.ranks if tier is cluster.tiers[-1] else group.inside(tier)
        if joined == inside:
            continue
        part = constants.network_part if tier is not cluster.tiers[0] else 1.0
        rate = min(rate, part * tier.busy_bytes_per_s * others / (group.ranks - inside))
        latency += tier.latency_s * (joined - inside) / others
        inside = joined
    return _alone(latency, rate)


def _alone(latency_s: float, bytes_per_s: float) -> Links:
    """Links that cost nothing but a latency and their bytes."""
    return Links(
        network=Link(latency_s, bytes_per_s),
        memory=Link(0.0, float("inf")),
        reduce_bytes_per_s=float("inf"),
        message_s=0.0,
        crowding=0.0,
        restarts=0.0,
        measured=False,
    )


def send_s(
    size_bytes: float, ranks: range, senders: int, cluster: Cluster, constants: Constants
) -> tuple[float, float]:
    """Seconds until all messages of one pipeline stage to another have come, each rank's to its counterpart: while all
    of them share the links above their nodes, and for one that has these to itself.

    ranks: from the first rank of either stage to the last of either. Where both stages are inside one instance of a
    tier, none of their messages leaves it; else that of the first or of the last pair does, and is waited for.
    senders: ranks of a stage. Of k that are in one instance of the tier inside, of d devices, each gets d by k times
    the oversubscription, and no more than its own adapter has.
    """
    tiers, first, last = cluster.tiers, ranks[0], ranks[-1]
    joins = (index for index, tier in enumerate(tiers) if first // tier.devices == last // tier.devices)
    outermost = next(joins, len(tiers) - 1)
    alone = shared = min(tiers[outermost].loaded_bytes_per_s, constants.send_bytes_per_s)
    for inside, tier in pairwise(tiers[: outermost + 1]):
        most = max(1.0, min(senders, inside.devices) * tier.oversubscription / inside.devices)
        shared = min(shared, tier.loaded_bytes_per_s / most)
    latency_s = tiers[outermost].latency_s
    return latency_s + size_bytes / shared, latency_s + size_bytes / alone
