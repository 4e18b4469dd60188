"""The talk on in-network computing with SHARP (Mellanox, ChipEx 2019)."""

from __future__ import annotations

from dataclasses import replace

from netfold.plan.cluster import load_cluster
from netfold.plan.validate.claims.by_link import said_of
from netfold.plan.validate.claims.claim import NEAR, Claim, ClaimJob, near
from netfold.tuning import DEFAULT_LINKS, Link, Topology
from netfold.tuning.cost import predict

_TALK = "seeds/001, Mellanox, SHARP, 2019"
_RESNET = ClaimJob(
    "resnet50",
    "sharp-hdr",
    128,
    128 * 256,
    {"precision": "f16", "optimizer": "momentum", "overlap": True},
    {"micro_batch": 256},
)
_SMALL_BYTES = 8
_NODES, _ON_A_NODE = 1500, 40


def claims() -> list[Claim]:
    return [_resnet(), _flat()]


def _resnet() -> Claim:
    beside, after = (_gain(overlap) for overlap in (True, False))
    ring = replace(_RESNET, job={**_RESNET.job, "overlap": False, "in_network": False}).best().prediction
    share = ring.exposed_s["data"] / ring.step_s
    low, high = near(16.0)
    return Claim(
        "SHARP, ResNet-50",
        _TALK,
        "SHARP provides 16% Performance Increase for deep learning, initial results. TensorFlow with Horovod running "
        "ResNet50 benchmark, HDR InfiniBand",
        16.0,
        beside,
        "%",
        low,
        high,
        f"{_RESNET.text}; with reductions in the network, and without",
        f"a ring at HDR's rate takes {100 * share:.0f}% of a step, and where nothing hides it a switch gains "
        f"{after:.1f}%; for 16% reductions must have been far from the line before, and the talk does not say how fast "
        f"they were; {said_of(_RESNET)}",
    )


def _gain(overlap: bool) -> float:
    """Percent."""
    ring, switch = (
        replace(_RESNET, job={**_RESNET.job, "overlap": overlap, "in_network": word}).best().prediction.samples_per_s
        for word in (False, True)
    )
    return 100 * (switch / ring - 1)


def _flat() -> Claim:
    tier = load_cluster("sharp-hdr").tiers[0]
    one_switch = tier.switch_ports
    few, many = (_small_s(nodes, switch=True) for nodes in (one_switch, _NODES))
    hosts_few, hosts_many = (_small_s(nodes, switch=False) for nodes in (one_switch, _NODES))
    return Claim(
        "SHARP, small all-reduces",
        _TALK,
        "SHARP All-Reduce Performance Advantages. 1500 Nodes, 60K MPI Ranks, Dragonfly+ Topology",
        1.0,
        many / few,
        "x",
        1 - NEAR,
        1 + NEAR,
        f"all_reduce of {_SMALL_BYTES} bytes over {_NODES * _ON_A_NODE:,} ranks on {_NODES:,} nodes of sharp-hdr, "
        f"against {one_switch * _ON_A_NODE:,} ranks below one switch",
        f"{1e6 * few:.1f} to {1e6 * many:.1f} us, of {tier.switch_levels(_NODES)} levels of switches of "
        f"{tier.switch_ports} ports; without them {1e6 * hosts_few:.0f} to {1e6 * hosts_many:.0f} us; the talk shows a "
        "flat curve and names no time",
    )


def _small_s(nodes: int, *, switch: bool) -> float:
    """Inside nodes through memory, one rank of each between them, by what is best there."""
    tier = load_cluster("sharp-hdr").tiers[0]
    latency_s = tier.way_up_s(nodes) if switch else tier.latency_s
    links = replace(DEFAULT_LINKS, network=Link(latency_s, tier.bytes_per_s), switches=(tier.bytes_per_s,))
    ranks = Topology.even(nodes * _ON_A_NODE, nodes)
    return predict("all_reduce", "hierarchical", _SMALL_BYTES, ranks, links, switch=int(switch))
