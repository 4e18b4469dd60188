"""Aggregators with their own links: times against hand-counted bytes, their keys in a cluster file, and the gain of one
more."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from netfold.cli import app
from netfold_plan.cluster import BOX, SPARE_HOST, Aggregator, Cluster, Device, Tier, cluster_of
from netfold_plan.request import parse_request
from netfold_plan.step import FITTED
from netfold_plan.step.traffic import Group, collective_s

# Collectives that cost their bytes on the links and nothing else.
BYTES_ALONE = replace(FITTED, collective_s=0.0, copy_bytes_per_s=float("inf"))
# One gigabyte over links of one gigabyte a second, each way: seconds are tensors.
N, B = 1e9, 1e9
# Cores that add more than any link here takes.
FREE = 1e15


def hosts(workers: int, *there: Aggregator, node: int = 1) -> Cluster:
    """Worker hosts whose links carry B each way, of `node` devices each; latencies are none."""
    device = Device("round", {"f32": 1e13}, 80e9, 1e12)
    inside = (Tier("inside", node, 0.0, 1e15),) if node > 1 else ()
    link = Tier("Ethernet", workers * node, 0.0, B / node, aggregators=there)
    return Cluster("hosts", device, (*inside, link))


def all_reduce_s(cluster: Cluster, ranks: int, *, alongside: int = 1, stride: int = 1) -> float:
    return collective_s(
        "all_reduce", N, Group(ranks, stride), cluster, BYTES_ALONE, in_network=True, alongside=alongside
    )


def linked(c: float, count: int = 1) -> Aggregator:
    return Aggregator(hosts=count, c=c, core_bytes_per_s=FREE)


def busiest_s(workers: int, c: float, part: float) -> float:
    """Of n bytes per worker, `part` goes through a switch with a link of c: seconds of the busiest link."""
    ring = 2 * (workers - 1) / workers * (1 - part) * N
    worker_sends, switch_receives = part * N + ring, workers * part * N
    return max(worker_sends / B, switch_receives / (c * B))


@pytest.mark.parametrize("workers", [4, 8])
@pytest.mark.parametrize("c", [0.25, 1, 2, 4])
def test_a_part_through_the_switch_ends_with_the_ring_beside_it(workers: int, c: float) -> None:
    found = all_reduce_s(hosts(workers, linked(c)), workers)
    # By trying every part in thousandths, and counting bytes.
    by_hand = min(busiest_s(workers, c, part / 1000) for part in range(1001))
    assert found == pytest.approx(by_hand, rel=2e-3)
    assert N / B <= found < 2 * (workers - 1) / workers * N / B or c >= workers


def test_aggregator_times_of_four_and_eight_workers_equal_hand_counted_values() -> None:
    # P = 8, c = 1: S = b/8, H = 8/14 b; S + H (1 - 1/8) = 0.125 + 0.5 = 0.625 b.
    assert all_reduce_s(hosts(8, linked(1)), 8) == pytest.approx(1 / 0.625)
    # P = 4, c = 2: S = b/2, H = 4/6 b; 1/2 + 1/3 = 5/6 b.
    assert all_reduce_s(hosts(4, linked(2)), 4) == pytest.approx(6 / 5)
    # A port per worker takes all of it: n bytes each way.
    ports = Aggregator(ports=True, core_bytes_per_s=FREE)
    assert all_reduce_s(hosts(4, ports), 4) == pytest.approx(1.0)
    assert all_reduce_s(hosts(8, ports), 8) == pytest.approx(1.0)


@pytest.mark.parametrize("workers", [4, 8])
def test_spare_hosts_reach_the_minimum_that_byteps_states(workers: int) -> None:
    # Jiang et al., OSDI 2020, section 4: 2n(n-1) / (n^2 + kn - 2k) of M/B, with n workers and k spare machines.
    for k in (1, 2, 4):
        least = 2 * workers * (workers - 1) / (workers**2 + k * workers - 2 * k)
        assert all_reduce_s(hosts(workers, linked(1, k)), workers) == pytest.approx(least * N / B)


def test_spare_hosts_with_links_like_the_workers_add_up() -> None:
    for count in (1, 2, 4):
        assert all_reduce_s(hosts(8, linked(1, count)), 8) == pytest.approx(all_reduce_s(hosts(8, linked(count)), 8))
    assert all_reduce_s(hosts(8, linked(1), linked(3)), 8) == pytest.approx(all_reduce_s(hosts(8, linked(4)), 8))


def test_cores_bound_the_rate_of_a_switch() -> None:
    # Eight ports of b, and one core that adds 2 b of contributions: as a link of 2 b.
    slow = Aggregator(ports=True, core_bytes_per_s=2 * B)
    assert all_reduce_s(hosts(8, slow), 8) == pytest.approx(all_reduce_s(hosts(8, linked(2)), 8))
    four = replace(slow, cores=4)
    assert all_reduce_s(hosts(8, four), 8) == pytest.approx(1.0)


def test_a_cluster_without_aggregators_uses_a_ring() -> None:
    ring = 2 * 7 / 8 * N / B
    assert all_reduce_s(hosts(8), 8) == pytest.approx(ring)
    named = hosts(8, linked(8))
    assert collective_s("all_reduce", N, Group(8), named, BYTES_ALONE) == pytest.approx(ring)
    # Only gradients use aggregators; other groups do not.
    assert collective_s("all_reduce", N, Group(8), named, BYTES_ALONE, True) == pytest.approx(ring)


def test_devices_of_a_host_and_concurrent_groups_share_the_aggregator() -> None:
    # Four hosts of two devices: each of the two groups between hosts moves half of the tensor over half of the link,
    # and the aggregator's link is shared alike.
    assert all_reduce_s(hosts(4, linked(2), node=2), 8) == pytest.approx(all_reduce_s(hosts(4, linked(2)), 4))
    # Two stages on four hosts each reduce at the same time: as if eight hosts sent to it.
    sharing = all_reduce_s(hosts(8, linked(4)), 4, alongside=2)
    assert sharing == pytest.approx(all_reduce_s(hosts(4, linked(2)), 4))
    # Of eight hosts each second one is in the group, and the others are in one of their own.
    assert all_reduce_s(hosts(8, linked(4)), 4, stride=2) == pytest.approx(sharing)


def own_host_s(workers: int, c: float, part: float) -> float:
    """The switch on worker 0's host, whose link is c times the others'; bytes each way, counted by hand."""
    ring = 2 * (workers - 1) / workers * (1 - part) * N
    other_s = (part * N + ring) / B
    # What the others send to it comes in, and the results go out to them; its own contribution stays inside.
    mine_s = ((workers - 1) * part * N + ring) / (c * B)
    return max(other_s, mine_s)


@pytest.mark.parametrize("workers", [4, 8])
@pytest.mark.parametrize("c", [0.5, 1, 1.5, 2, 3])
def test_a_workers_own_host_pays_only_where_its_link_is_faster(workers: int, c: float) -> None:
    there = Aggregator(c=c, core_bytes_per_s=FREE, worker=True)
    found = all_reduce_s(hosts(workers, there), workers)
    parts = [part / 1000 for part in range(1001)]
    best = min(own_host_s(workers, c, part) for part in parts)
    if c <= 1:
        # No part through the switch beats a ring.
        assert best == own_host_s(workers, c, 0.0)
        assert found == pytest.approx(2 * (workers - 1) / workers * N / B)
        assert there.gives(B, workers) == 0
    else:
        assert found == pytest.approx(best, rel=2e-3) and found < 2 * (workers - 1) / workers * N / B


FILE: dict[str, Any] = {
    "device": "p100",
    "tier": [{"name": "Ethernet", "devices": 8, "latency": "60 us", "rate": "1 Gbit/s"}],
}


def said(*there: Any) -> Cluster:
    return cluster_of({**FILE, "tier": [FILE["tier"][0] | {"aggregator": list(there)}]}, "ours")


def test_a_cluster_file_names_its_aggregators_and_their_links() -> None:
    (tier,) = said(
        {"link": 2, "hosts": 3},
        {"link": "10 Gbit/s", "cores": 4, "core_rate": "9 Gbit/s"},
        {"link": "a port per worker"},
        {"link": 4, "worker": True},
    ).tiers
    two, wide, box, own = tier.aggregators
    assert (two.c, two.hosts, wide.bytes_per_s, wide.cores) == (2, 3, 10e9 / 8, 4)
    assert wide.core_bytes_per_s == pytest.approx(9e9 / 8) and own.worker and box == BOX
    assert two.link_bytes_per_s(1e9 / 8, 8) == 2e9 / 8 and box.link_bytes_per_s(1e9 / 8, 8) == 1e9


def test_the_rate_of_a_core_equals_the_measurement() -> None:
    text = (Path(__file__).parents[3] / "lab" / "bench" / "results" / "switch_cost.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| this tree | GRO on, results cut by the link |"))
    low, high = (float(each) for each in row.split("|")[4].split(".."))
    assert low <= 8 * SPARE_HOST.core_bytes_per_s / 1e9 <= high


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ({}, "has no link"),
        ({"link": 0}, "link is 0"),
        ({"link": "10 GB"}, "a quantity of bytes"),
        ({"link": 1, "port": 2}, "'port' is not known"),
        ({"link": 1, "hosts": 0}, "hosts = 0; it must be a whole number"),
        ({"link": 1, "core_rate": 7}, "has no unit"),
        ({"link": 1, "worker": 1}, "true or false"),
        ({"link": "a port per worker", "worker": True}, "has no port for each worker"),
    ],
)
def test_an_impossible_aggregator_is_refused_in_a_sentence(table: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match="cluster ours, tier Ethernet, aggregator") as error:
        said(table)
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_an_aggregator_beside_reducing_switches_or_inside_a_host_is_refused() -> None:
    tier = FILE["tier"][0] | {"aggregator": [{"link": 1}]}
    with pytest.raises(ValueError, match="whose switches aggregate"):
        cluster_of({**FILE, "tier": [tier | {"in_network": True}]}, "ours")
    with pytest.raises(ValueError, match="an aggregator is a host"):
        cluster_of({**FILE, "tier": [tier, FILE["tier"][0] | {"name": "outer", "devices": 64}]}, "ours")
    with pytest.raises(ValueError, match="cores, whose switch"):
        cluster_of({**FILE, "shared": {"cores": 2}, "tier": [tier]}, "ours")


def asked(cluster: str | dict[str, Any], **job: Any) -> dict[str, Any]:
    return {"model": "vgg16:measured=true", "cluster": cluster, "job": {"gpus": 8, "batch": 512, **job}}


def test_in_network_reduction_without_a_reducing_switch_is_off_and_refused_on_request() -> None:
    file = {**FILE, "tier": [FILE["tier"][0] | {"aggregator": [{"link": 1}]}]}
    assert not parse_request(asked(FILE, precision="f32"), {}).job.in_network
    assert parse_request(asked(file, precision="f32"), {}).job.in_network
    assert not parse_request(asked(file, precision="f32", in_network=False), {}).job.in_network
    with pytest.raises(ValueError, match=r"nothing in .* aggregates"):
        parse_request(asked(FILE, precision="f32", in_network=True), {})


ASKED = ("--model", "vgg16:measured=true", "--ranks", "8", "--batch", "512", "--precision", "f32", "--overlap")


def plan(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *ASKED, *arguments])
    return result.exit_code, result.output


@pytest.mark.parametrize("network", ["aggregator", "two-aggregators", "linux-box"])
def test_networks_with_aggregators_are_compared_by_name(network: str) -> None:
    code, text = plan("--cluster", "ethernet-1g", "--compare", f"network={network}", "--output", "json")
    assert code == 0
    (there,) = json.loads(text)["comparisons"][f"network={network}"][1:]
    assert there["factor"] > 1 and there["best"]["job"]["in_network"]
