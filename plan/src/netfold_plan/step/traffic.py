"""The time of communication in a cluster: the formulas of netfold.tuning.cost, with the links of a group's ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from netfold.tuning.cost import HALVES, predict
from netfold.tuning.topology import Link, Links, Topology
from netfold_plan.cluster import Cluster, Tier
from netfold_plan.step.constants import Constants


@dataclass(frozen=True)
class Group:
    """`ranks` ranks, each `stride` devices after the one before."""

    ranks: int
    stride: int = 1

    def inside(self, tier: Tier) -> int:
        """The number of them in one instance of a tier."""
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
    """Seconds of one collective by the cheapest of these:

    - one ring through all ranks, which leaves a node by as many adapters as ranks are inside;
    - rings inside nodes, and a ring or a tree between nodes;
    - with `in_network`, where all tiers between the ranks can: a reduction in the network, in a node and between nodes;
    - with `in_network`: a reduction by aggregators, of the whole tensor, or of a part with a ring for the rest.

    In an all_to_all every rank sends to every other rank, and leaves its node by its own adapter.
    one_ring: one ring through all ranks, which leaves each node by one adapter.
    wire: the format in which f32 is sent.
    alongside: how many groups, this one included, use the cluster's aggregators at the same time; 0: this group uses
    none.
    """
    if group.ranks == 1 or size_bytes == 0:
        return 0.0
    if wire in HALVES and operation == "all_reduce":
        size_bytes /= 2
    copied = size_bytes / (cluster.device.copy_bytes_per_s or constants.copy_bytes_per_s)
    if one_ring:
        seconds = predict(operation, "ring", size_bytes, _apart(group.ranks), _links(group, cluster, constants, True))
    else:
        seconds = min(_candidates(operation, size_bytes, group, cluster, constants, in_network, alongside))
    return constants.collective_s + copied + seconds


def _candidates(
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
    found = [_along(operation, "ring", size_bytes, group, cluster, constants)]
    if operation != "all_reduce":
        return found
    if inside == group.ranks or inside == 1:
        if not in_network:
            return found
        return [
            *found,
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
        # A node reduces its part before the part leaves the node, so both levels add up.
        around = min(around, *_through_switches(size_bytes, within, cluster, constants), float("inf"))
        between += _through_switches(part, nodes, cluster, constants)
        between += _by_aggregators(part, nodes, cluster, constants, alongside)
    found.append(around + min(between))
    return found


def _through_switches(size_bytes: float, group: Group, cluster: Cluster, constants: Constants) -> list[float]:
    """Seconds of an all_reduce by the switches of the tiers between the ranks; empty where a tier cannot reduce."""
    crossed = _crossed(group, cluster)
    if not all(tier.in_network for tier in crossed):
        return []
    if crossed[-1].nvls:
        # Each rank loads the sum of its part and stores it to all ranks: one part more than the tensor in each
        # direction.
        size_bytes *= 1 + 1 / group.ranks
    below = next((tier.devices for tier in reversed(cluster.tiers) if tier.devices < crossed[-1].devices), 1)
    joined = -(-group.ranks * group.stride // below)
    links = _links(group, cluster, constants)
    network = replace(links.network, latency_s=crossed[-1].up_latency_s(joined))
    # A switch with one port per worker.
    links = replace(links, network=network, switches=(network.bytes_per_s,))
    return [predict("all_reduce", "in_network", size_bytes, _apart(group.ranks), links, switch=1)]


def _by_aggregators(
    size_bytes: float, group: Group, cluster: Cluster, constants: Constants, alongside: int
) -> list[float]:
    """Seconds of an all_reduce by the aggregators of the outermost tier between ranks on different hosts.

    Of the whole tensor, and of a part with a ring for the rest; empty without aggregators. Between two ranks are
    `stride` devices, whose own groups send at the same time.
    """
    tier = _crossed(group, cluster)[-1]
    devices = group.ranks * group.stride * alongside
    hosts = -(-devices // cluster.host_devices)
    if not tier.aggregators or hosts < 2:
        return []
    host_bytes_per_s = cluster.host_devices * constants.network_part * tier.loaded_bytes_per_s
    given = sum(each.gives(host_bytes_per_s, hosts) for each in tier.aggregators) / cluster.host_devices
    if not given:
        return []
    links = replace(_links(group, cluster, constants), switches=(given,))
    names = ("in_network", "split") if group.ranks > 2 else ("in_network",)
    return [predict("all_reduce", name, size_bytes, _apart(group.ranks), links, switch=1) for name in names]


def _crossed(group: Group, cluster: Cluster) -> list[Tier]:
    """The tiers that messages between a group's ranks cross."""
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
    """The links that bound rings through the group: an instance of a tier is left by all ranks inside together."""
    rate, latency, inside = float("inf"), 0.0, 1
    for tier in cluster.tiers:
        if group.inside(tier) == inside and inside < group.ranks and tier is not cluster.tiers[-1]:
            continue
        if inside >= group.ranks:
            break
        part = constants.network_part if tier is not cluster.tiers[0] else 1.0
        rate = min(rate, (1 if one_ring else inside) * part * tier.busy_bytes_per_s)
        # The part of all hops that cross this tier, and no tier outside.
        joined = group.inside(tier)
        hops = group.ranks / inside - (group.ranks / joined if joined < group.ranks else 0)
        latency += tier.latency_s * hops / group.ranks
        inside = joined
    return _alone(latency, rate)


@lru_cache(maxsize=4096)
def _links_of_pairs(group: Group, cluster: Cluster, constants: Constants) -> Links:
    """The links that bound ranks that each send to every other rank, by their own adapters.

    Of n bytes per rank, n (P-i)/P leave an instance of the tier inside with i of the ranks. The tier carries these,
    with everything that goes further out. At the rate found, n (P-1)/P take as long as the bytes of the busiest tier.
    The latency is the mean over a rank's partners.
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
    """Links that cost only a latency and their bytes."""
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
    """Seconds until all messages of a pipeline stage to another have arrived, each rank's at its counterpart.

    First where all of them share the links above their nodes, then for a message that has these links to itself.
    ranks: from the first rank of either stage to the last of either. Where both stages are inside one instance of a
    tier, no message leaves it; else the message of the first or the last pair does, and is waited for.
    senders: ranks of a stage. Of k senders in one instance of the tier inside, with d devices, each gets d by k times
    the oversubscription of the links, and at most its own adapter.
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
