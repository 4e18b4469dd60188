"""How long ranks of a cluster talk: the formulas of netfold.plan.cost, with the links that a group's ranks have."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from netfold.plan.cluster import Cluster, Tier
from netfold.plan.cost import HALVES, predict
from netfold.plan.step.constants import Constants
from netfold.plan.topology import Link, Links, Topology


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
) -> float:
    """Seconds. The cheapest of: rings through all, as many as leave a node together; rings inside and between nodes; a
    reduction inside the network, in a node and between nodes, where asked for and the tiers that it crosses can.

    one_ring: a single ring through all, which leaves each node by one adapter. wire: what f32 travels as.
    """
    if group.ranks == 1 or size_bytes == 0:
        return 0.0
    if wire in HALVES and operation == "all_reduce":
        size_bytes /= 2
    copied = size_bytes / (cluster.device.copy_bytes_per_s or constants.copy_bytes_per_s)
    if one_ring:
        seconds = predict(operation, "ring", size_bytes, _apart(group.ranks), _links(group, cluster, constants, True))
    else:
        seconds = min(_ways(operation, size_bytes, group, cluster, constants, in_network))
    return constants.collective_s + copied + seconds


def _ways(
    operation: str, size_bytes: float, group: Group, cluster: Cluster, constants: Constants, in_network: bool
) -> list[float]:
    inner = cluster.tiers[0]
    inside = group.inside(inner)
    ways = [
        _along(operation, "ring" if operation != "all_to_all" else "pairwise", size_bytes, group, cluster, constants)
    ]
    if operation != "all_reduce":
        return ways
    if inside == group.ranks or inside == 1:
        return ways + (_through_switches(size_bytes, group, cluster, constants) if in_network else [])
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
    return [predict("all_reduce", "in_network", size_bytes, _apart(group.ranks), replace(links, network=network))]


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
    return Links(
        network=Link(latency, rate),
        memory=Link(0.0, float("inf")),
        reduce_bytes_per_s=float("inf"),
        message_s=0.0,
        crowding=0.0,
        restarts=0.0,
        measured=False,
    )


def send_s(size_bytes: float, distance: int, cluster: Cluster, constants: Constants) -> float:
    """Seconds for one message to a rank `distance` devices on."""
    tier = next(tier for tier in cluster.tiers if tier.devices > distance or tier is cluster.tiers[-1])
    return tier.latency_s + size_bytes / min(tier.bytes_per_s, constants.send_bytes_per_s)
