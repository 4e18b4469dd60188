"""The cost model: formulas against hand-counted values, and a link fitted to samples."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from netfold.tuning import DEFAULT_LINKS, OPERATIONS, SUPPORTS, Link, Links, Topology, build_table, fit_link
from netfold.tuning.cost import FORMULAS, Case, predict, switch_part

# A message takes a second and a byte a second: steps and bytes can be read off.
STEPS = dataclasses.replace(
    DEFAULT_LINKS,
    network=Link(latency_s=1.0, bytes_per_s=1e30),
    reduce_bytes_per_s=1e30,
    message_s=0.0,
    crowding=0.0,
    restarts=0.0,
)
BYTES = dataclasses.replace(STEPS, network=Link(latency_s=0.0, bytes_per_s=1.0))
REDUCTIONS = dataclasses.replace(STEPS, network=Link(latency_s=0.0, bytes_per_s=1e30), reduce_bytes_per_s=1.0)


def seconds(links: Links, operation: str, algorithm: str, ranks: int, size: float = 1 << 20) -> float:
    return predict(operation, algorithm, size, Topology.apart(ranks), links)


@pytest.mark.parametrize(
    ("operation", "algorithm", "ranks", "steps", "sent", "folded"),
    [
        # steps; bytes sent by the busiest rank and bytes reduced, as parts of the tensor
        ("all_reduce", "direct", 4, 1, 3, 3),
        ("all_reduce", "ring", 4, 6, 1.5, 0.75),
        ("all_reduce", "halving_doubling", 8, 6, 1.75, 0.875),
        ("all_reduce", "halving_doubling", 6, 6, 3.5, 1.75),
        ("reduce_scatter", "ring", 4, 3, 0.75, 0.75),
        ("reduce_scatter", "direct", 4, 1, 0.75, 0.75),
        ("all_gather", "ring", 8, 7, 0.875, 0),
        ("all_gather", "bruck", 5, 3, 0.8, 0),
        ("all_gather", "halving_doubling", 8, 3, 0.875, 0),
        ("reduce_scatter", "halving_doubling", 8, 3, 0.875, 0.875),
        # Q = 2, 4, 4, 4, 8 ranks in the core: n bytes handed over, and n(Q-1)/Q among Q
        *(
            (operation, "halving_doubling", ranks, steps, part, part if operation == "reduce_scatter" else 0)
            for operation in ("reduce_scatter", "all_gather")
            for ranks, steps, part in ((3, 3, 1.5), (5, 4, 1.75), (6, 4, 1.75), (7, 4, 1.75), (12, 5, 1.875))
        ),
        ("barrier", "bruck", 5, 3, 0, 0),
        ("gather", "tree", 5, 3, 0.8, 0),
        ("all_to_all", "direct", 4, 1, 0.75, 0),
        ("all_to_all", "pairwise", 5, 2, 0.8, 0),
        ("all_to_all", "bruck", 8, 3, 1.5, 0),
        ("broadcast", "direct", 4, 1, 3, 0),
        ("reduce", "direct", 4, 1, 3, 3),
        # behind one link like a rank's, which carries the bytes of all ranks
        ("all_reduce", "in_network", 64, 2, 64, 0),
        ("reduce", "in_network", 64, 2, 64, 0),
        ("broadcast", "in_network", 64, 2, 64, 0),
        ("reduce_scatter", "in_network", 4, 2, 4, 0),
        ("all_gather", "in_network", 4, 2, 4, 0),
        ("barrier", "in_network", 64, 2, 0, 0),
    ],
)
def test_a_formula_has_the_steps_bytes_and_reductions_of_its_algorithm(
    operation: str, algorithm: str, ranks: int, steps: float, sent: float, folded: float
) -> None:
    assert seconds(STEPS, operation, algorithm, ranks) == pytest.approx(steps)
    assert seconds(BYTES, operation, algorithm, ranks) / (1 << 20) == pytest.approx(sent)
    assert seconds(REDUCTIONS, operation, algorithm, ranks) / (1 << 20) == pytest.approx(folded, abs=1e-9)


@pytest.mark.parametrize(
    ("operation", "sent"),
    # Four ranks on two hosts: what two ranks would send each, where four apart would share links.
    [
        ("all_reduce", 1.0),
        ("reduce", 1.0),
        ("broadcast", 1.0),
        ("all_gather", 0.5),
        ("reduce_scatter", 0.5),
        ("barrier", 0.0),
    ],
)
def test_a_hierarchical_operation_sends_the_bytes_of_one_rank_a_host(operation: str, sent: float) -> None:
    memory = dataclasses.replace(BYTES, memory=Link(latency_s=0.0, bytes_per_s=1e30))
    pairs = Topology((0, 1, 0, 1))
    size = 1 << 20
    assert predict(operation, "hierarchical", size, pairs, memory) / size == pytest.approx(sent)
    chosen = build_table(ranks=4, switch=None, topology=pairs, links=DEFAULT_LINKS).choose(operation, size)
    assert chosen.algorithm == "hierarchical" and "between hosts; predicted" in chosen.reason


def test_a_switch_takes_one_tensor_a_host_where_ranks_share_memory() -> None:
    memory = dataclasses.replace(BYTES, memory=Link(latency_s=0.0, bytes_per_s=1e30))
    pairs = Topology.even(8, 2)
    memory = dataclasses.replace(memory, switches=(1.0,))
    assert predict("all_reduce", "hierarchical", 1000, pairs, memory, switch=1) == pytest.approx(1000)
    assert predict("all_reduce", "in_network", 1000, pairs, memory, switch=1) == pytest.approx(4000)


@pytest.mark.parametrize(
    ("hosts", "c", "alone", "together"),
    [
        # In tensors at a link's rate. A ring of 8 takes 1.75, of 4 takes 1.5.
        (8, 8, 1.0, 1.0),
        (8, 4, 2.0, 1 / (1 / 2 + 1 / 2 / 1.75)),
        (8, 1, 8.0, 1 / (1 / 8 + 7 / 8 / 1.75)),
        (4, 2, 2.0, 1 / (1 / 2 + 1 / 2 / 1.5)),
        (2, 1, 2.0, 1.0),
    ],
)
def test_a_split_gives_the_switch_the_part_for_its_link_and_the_ring_the_rest(
    hosts: int, c: float, alone: float, together: float
) -> None:
    size = 1 << 20
    links = dataclasses.replace(BYTES, switches=(c / hosts,))
    assert predict("all_reduce", "in_network", size, Topology.apart(hosts), links) / size == pytest.approx(alone)
    assert predict("all_reduce", "split", size, Topology.apart(hosts), links) / size == pytest.approx(together)
    # Both end at once: the part that is the switch's, at its rate.
    part = switch_part(Case(size, Topology.apart(hosts), links))
    assert part * alone == pytest.approx(together)


def test_switches_side_by_side_add_up_to_a_ranks_link() -> None:
    size, hosts = 1 << 20, Topology.apart(8)
    for count, expected in ((1, 8.0), (2, 4.0), (8, 1.0), (16, 1.0)):
        assert predict("all_reduce", "in_network", size, hosts, BYTES, switch=count) / size == pytest.approx(expected)
    measured = dataclasses.replace(BYTES, switches=(0.25, 0.125))
    assert predict("all_reduce", "in_network", size, hosts, measured, switch=2) / size == pytest.approx(8 / 3)


def test_pipelines_approach_one_tensor_per_link_plus_one_chunk_per_hop() -> None:
    large = 1 << 30
    for operation, algorithm, tensors in (
        ("broadcast", "chain", 1),
        ("broadcast", "tree", 1),
        ("all_reduce", "tree", 2),
    ):
        sent = seconds(BYTES, operation, algorithm, 4, large) / large
        assert tensors < sent < tensors + 0.01
    # Two hops of a 64th after the first.
    assert seconds(BYTES, "broadcast", "chain", 4, 2 << 20) / (2 << 20) == pytest.approx(1 + 2 / 64)


def test_a_small_tree_is_binomial() -> None:
    assert seconds(STEPS, "broadcast", "tree", 8, 1024) == 3
    assert seconds(STEPS, "all_reduce", "tree", 9, 1024) == 8


def test_sharing_a_port_and_changing_partners_cost_time() -> None:
    crowded = dataclasses.replace(BYTES, crowding=0.1)
    assert seconds(crowded, "all_gather", "direct", 4) == pytest.approx(1.2 * seconds(BYTES, "all_gather", "direct", 4))
    assert seconds(crowded, "all_gather", "ring", 4) == seconds(BYTES, "all_gather", "ring", 4)
    restarts = dataclasses.replace(BYTES, restarts=0.1)
    assert seconds(restarts, "all_gather", "bruck", 4) == pytest.approx(1.1 * seconds(BYTES, "all_gather", "bruck", 4))


def test_ranks_of_one_host_share_its_link_except_in_a_ring() -> None:
    size, topology = 1 << 20, Topology.even(8, 4)
    alone = predict("all_gather", "direct", size, Topology.apart(8), BYTES)
    assert predict("all_gather", "direct", size, topology, BYTES) == pytest.approx(2 * alone)
    alone = predict("all_gather", "ring", size, Topology.apart(8), BYTES)
    assert predict("all_gather", "ring", size, topology, BYTES) == pytest.approx(alone)


def test_every_algorithm_has_a_formula_with_a_source() -> None:
    for algorithm, operations in SUPPORTS.items():
        for operation in set(operations) & set(OPERATIONS) if algorithm != "local" else ():
            assert len(FORMULAS[operation, algorithm].source.split()) > 3, (operation, algorithm)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8, 64])
def test_costs_grow_with_size_and_are_never_negative(ranks: int) -> None:
    for operation, algorithm in FORMULAS:
        topology = Topology.even(ranks, 1) if algorithm == "shared_memory" else Topology.apart(ranks)
        for size in (0, 1, 1000, 1 << 20, 1 << 32):
            now, more = (predict(operation, algorithm, each, topology, DEFAULT_LINKS) for each in (size, 2 * size + 64))
            assert 0 < now <= more


@pytest.mark.parametrize("link", [Link(60e-6, 118e6), Link(10e-6, 2.5e9), Link(5e-3, 1e6)])
def test_a_fit_finds_the_link_under_noise_that_only_slows(link: Link) -> None:
    noise = np.random.default_rng(7)
    samples = [
        (size, (link.latency_s + size / link.bytes_per_s) * (1 + noise.exponential(0.1)))
        for size in (1, 32 << 10, 256 << 10, 1 << 20)
        for _ in range(10)
    ]
    found = fit_link(samples)
    assert found.latency_s == pytest.approx(link.latency_s, rel=0.2)
    assert found.bytes_per_s == pytest.approx(link.bytes_per_s, rel=0.1)


def test_a_burst_that_passes_at_once_does_not_hide_the_rate() -> None:
    """Found in the rack: a token bucket of 128 KB made 1 Gbit/s look like 5."""
    samples = [(size, 25e-6 + max(0, size - (128 << 10)) / 119e6) for size in (1, 32 << 10, 256 << 10, 1 << 20)]
    found = fit_link(samples)
    assert found.bytes_per_s == pytest.approx(119e6, rel=0.01)
    assert found.latency_s == pytest.approx(25e-6, rel=0.01)


def test_a_fit_needs_two_sizes_and_accepts_a_falling_line() -> None:
    with pytest.raises(ValueError, match="two sizes or more"):
        fit_link([(64, 1e-5), (64, 2e-5)])
    found = fit_link([(1, 2e-5), (1 << 20, 1e-5)])
    assert found.latency_s > 0 and found.bytes_per_s > 0
    with pytest.raises(ValueError, match="more than 0 s, not -1e-05 s"):
        fit_link([(1, 2e-5), (1 << 20, -1e-5)])


def test_equal_times_of_two_sizes_give_no_rate_beyond_the_larger_size() -> None:
    """Least squares leave a slope of 1e-26 s per byte here, by rounding."""
    found = fit_link([(1, 5e-3), (32 << 10, 5e-5), (256 << 10, 5e-5), (1 << 20, 5e-5)])
    assert found.bytes_per_s == pytest.approx((1 << 20) / 5e-5)


def test_links_survive_json() -> None:
    assert Links.from_json(DEFAULT_LINKS.to_json()) == DEFAULT_LINKS


def test_ranks_are_spread_over_hosts_in_order() -> None:
    assert Topology.even(5, 2).nodes == (0, 0, 0, 1, 1)
    assert Topology.even(4, 4).nodes == Topology.apart(4).nodes
    with pytest.raises(ValueError, match="2 ranks cannot be on 3 hosts"):
        Topology.even(2, 3)


def test_a_link_with_a_burst_is_fitted_to_the_bytes_after_the_burst() -> None:
    # As a link of 200 Mbit/s answered: 128 KB pass at once, and only one message was larger.
    link = fit_link([(1, 16e-6), (32 << 10, 26e-6), (256 << 10, 10.3e-3)])
    assert 20e6 < link.bytes_per_s < 26e6
