"""Reductions in switches: inside a node by NVLink's, between nodes by trees as deep as their ports make them."""

from dataclasses import replace
from pathlib import Path

import pytest

from netfold_plan.cluster import Cluster, load_cluster
from netfold_plan.job import Job, Split
from netfold_plan.model import Transformer
from netfold_plan.step import FITTED, predict
from netfold_plan.step.traffic import Group, collective_s

GIB = 1 << 30


def _bus_gb_per_s(cluster: Cluster, ranks: int, *, in_network: bool) -> float:
    """As nccl-tests counts it."""
    size = 4 * GIB
    seconds = collective_s("all_reduce", size, Group(ranks), cluster, FITTED, in_network)
    return 2 * (ranks - 1) / ranks * size / seconds / 1e9


# H100 with NVLS at 2 to 4 GiB: github.com/NVIDIA/nccl/issues/1455; 8 of H200 have 475, nccl-tests/issues/272.
@pytest.mark.parametrize(("ranks", "measured"), [(4, 370), (5, 420), (6, 440), (7, 460), (8, 480)])
def test_predicted_nvlink_switch_reductions_match_measurements(ranks: int, measured: float) -> None:
    assert _bus_gb_per_s(load_cluster("dgx-h100"), ranks, in_network=True) == pytest.approx(measured, rel=0.05)


def test_a_predicted_ring_inside_an_h100_node_matches_measurements() -> None:
    """365 to 370, the same source."""
    assert _bus_gb_per_s(load_cluster("dgx-h100"), 8, in_network=False) == pytest.approx(367, rel=0.06)


def test_without_a_request_or_capability_the_algorithm_is_a_ring() -> None:
    h100, a100 = load_cluster("dgx-h100"), load_cluster("dgx-a100")
    assert _bus_gb_per_s(h100, 8, in_network=False) < _bus_gb_per_s(h100, 8, in_network=True)
    assert _bus_gb_per_s(a100, 8, in_network=True) == _bus_gb_per_s(a100, 8, in_network=False)


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter"])
def test_reduce_scatter_and_all_gather_gain_nothing_by_switches(operation: str) -> None:
    cluster = load_cluster("dgx-h100")
    ring, switch = (collective_s(operation, GIB, Group(8), cluster, FITTED, word) for word in (False, True))
    assert ring == switch


def test_tensor_parallel_ranks_and_gradients_across_nodes_use_switch_reductions() -> None:
    cluster, model = load_cluster("dgx-h100"), Transformer("GPT", 4096, 32, 8, 2048)
    ring, switch = (predict(model, cluster, Job(64, 1, Split(4, 8), in_network=word)) for word in (False, True))
    assert switch.exposed_s["tensor"] < ring.exposed_s["tensor"]
    # Where adapters are slow, so that what nodes add up first counts.
    inside, outside = cluster.tiers[0], replace(cluster.tiers[1], bytes_per_s=5e9)
    both, between = (
        replace(cluster, tiers=(tier, outside)) for tier in (inside, replace(inside, in_network=False, nvls=False))
    )
    everywhere, outer = (collective_s("all_reduce", GIB, Group(64), each, FITTED, True) for each in (both, between))
    assert everywhere < outer < collective_s("all_reduce", GIB, Group(64), both, FITTED)


@pytest.mark.parametrize(
    ("joined", "levels"), [(2, 1), (40, 1), (41, 2), (800, 2), (801, 3), (1500, 3), (16000, 3), (16001, 4)]
)
def test_the_depth_of_a_fat_tree_follows_from_its_ports(joined: int, levels: int) -> None:
    assert load_cluster("sharp-hdr").tiers[0].switch_levels(joined) == levels


def test_eight_bytes_on_128_hosts_take_the_published_time() -> None:
    """2.83 us: Graham et al. 2016, of which the preset's latency is."""
    tier = load_cluster("sharp-hdr").tiers[0]
    assert 2 * tier.up_latency_s(128) == pytest.approx(2.83e-6, rel=0.02)


def test_levels_cost_a_small_reduction_their_latency_twice() -> None:
    cluster = load_cluster("sharp-hdr")
    below_one, below_three = (
        collective_s("all_reduce", 8.0, Group(count), cluster, FITTED, True) for count in (40, 1500)
    )
    assert below_three - below_one == pytest.approx(2 * 2 * 130e-9)
    flat = replace(cluster, tiers=(replace(cluster.tiers[0], switch_ports=0),))
    assert collective_s("all_reduce", 8.0, Group(1500), flat, FITTED, True) == pytest.approx(below_one)


_TIER = """
device = "h100"
[[tier]]
name = "all"
devices = 64
latency = "1 us"
rate = "50 GB/s"
"""


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ('nvls = "yes"', "nvls = 'yes'; it must be true or false"),
        ("nvls = true\nin_network = false", "nvls is a reduction in the network, and in_network is false"),
        ("switch_ports = 40", "has only one of switch_ports and switch_latency"),
        ('switch_latency = "130 ns"', "has only one of switch_ports and switch_latency"),
        ('switch_ports = 3\nswitch_latency = "130 ns"', "at least 4 ports, and these have 3"),
        ('switch_ports = 40\nswitch_latency = "130 GB"', "is a quantity of bytes, where one of time is needed"),
    ],
)
def test_impossible_switches_are_refused_in_a_sentence(tmp_path: Path, keys: str, said: str) -> None:
    (tmp_path / "ours.toml").write_text(_TIER + keys)
    with pytest.raises(ValueError, match=said):
        load_cluster(str(tmp_path / "ours.toml"))


def test_nvls_is_a_reduction_in_the_network(tmp_path: Path) -> None:
    (tmp_path / "ours.toml").write_text(_TIER + "nvls = true")
    assert load_cluster(str(tmp_path / "ours.toml")).tiers[0].in_network
