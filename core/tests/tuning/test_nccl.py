"""Times of NCCL's algorithms and protocols, against arithmetic by hand."""

from __future__ import annotations

import pytest

from netfold.tuning.nccl import PROTOCOLS, SIZES, rows, seconds, table_text
from netfold.tuning.topology import Link

MB = 1 << 20
LINK = Link(20e-6, 1e9)


def test_a_ring_of_one_rank_a_host_has_the_links_steps_and_bytes() -> None:
    """4 hosts: 6 steps of 20 + 14 us, after 8.4 us; each sends 6/4 of the tensor, and LL sends twice that."""
    simple = seconds("all_reduce", "ring", "Simple", 4 * MB, 4, 4, LINK)
    assert simple == pytest.approx(8.4e-6 + 6 * 34e-6 + 1.5 * 4 * MB / 1e9)
    low_latency = seconds("all_reduce", "ring", "LL", 4 * MB, 4, 4, LINK)
    assert low_latency == pytest.approx(6.8e-6 + 6 * 22.7e-6 + 2 * 1.5 * 4 * MB / 1e9)
    gather = seconds("all_gather", "ring", "LL128", 4 * MB, 4, 4, LINK)
    assert gather == pytest.approx(14e-6 + 3 * 24e-6 + 0.75 * 4 * MB / (1e9 * 120 / 128))


def test_steps_on_a_host_do_not_have_the_networks_latency() -> None:
    """16 ranks on 2 hosts: 30 steps, of which 2 cross hosts and 28 take 5.7 us."""
    took = seconds("all_reduce", "ring", "Simple", 16 * MB, 16, 2, LINK)
    assert took == pytest.approx(8.4e-6 + 2 * 34e-6 + 28 * 5.7e-6 + 30 / 16 * 16 * MB / 1e9)


def test_a_tree_is_up_and_down_between_hosts_and_a_chain_on_each() -> None:
    """1 KB on 16 ranks of 8 hosts: 6 hops of 20 + 5 us, and the tensor sent twice, with as many bytes of flags."""
    took = seconds("all_reduce", "tree", "LL", 1024, 16, 8, LINK)
    assert took == pytest.approx((6.8 + 2 * 1 * 1.0) * 1e-6 + 6 * 25e-6 + 2 * 2 * 1024 / 1e9)


def test_a_tree_of_two_hosts_sends_as_much_as_a_ring() -> None:
    took = seconds("all_reduce", "tree", "LL128", 60_000, 2, 2, LINK)
    assert took == pytest.approx(14e-6 + 2 * 28.5e-6 + 64_000 / 1e9)


def test_each_hop_of_a_tree_with_simple_waits_for_a_piece() -> None:
    """4 hosts: 4 hops, each with half of a small tensor, and with 512 KB of a large one."""
    small = seconds("all_reduce", "tree", "Simple", 100_000, 4, 4, LINK)
    assert small == pytest.approx(8.4e-6 + 4 * 34e-6 + (2 + 4 / 2) * 100_000 / 1e9)
    large = seconds("all_reduce", "tree", "Simple", 64 * MB, 4, 4, LINK)
    assert large == pytest.approx(8.4e-6 + 4 * 34e-6 + (2 * 64 * MB + 4 * (512 << 10)) / 1e9)


def test_small_tensors_between_slow_hosts_stay_in_a_tree() -> None:
    """As measured (lab/bench/nccl_choices.py): of 8 hosts at 1 Gbit/s a ring of 16 KB takes over 2 times a tree's."""
    link = Link(23e-6, 120e6)
    for size in (1024, 4096, 16384):
        tree, ring = (seconds("all_reduce", how, "LL128", size, 8, 8, link) for how in ("tree", "ring"))
        assert tree < ring


@pytest.mark.parametrize(("ranks", "hosts"), [(2, 2), (8, 8), (16, 2), (64, 8)])
def test_small_tensors_take_the_short_protocol_and_large_ones_the_whole_link(ranks: int, hosts: int) -> None:
    took = {(size, how, by): us for name, size, how, by, us in rows(ranks, hosts, LINK) if name == "all_reduce"}
    assert all(us > 0 for us in took.values())
    for size, wanted in ((SIZES[0], "LL"), (SIZES[-1], "Simple")):
        best = min((each for each in took if each[0] == size), key=took.__getitem__)
        assert best[2] == wanted
    for how in ("ring", "tree"):
        for by in PROTOCOLS:
            times = [took[size, how, by] for size in SIZES]
            assert times == sorted(times)


def test_what_is_not_modelled_is_refused() -> None:
    with pytest.raises(ValueError, match="4 ranks on 1 hosts: only what crosses hosts"):
        seconds("all_reduce", "ring", "LL", MB, 4, 1, LINK)
    with pytest.raises(ValueError, match="only what crosses hosts"):
        seconds("all_reduce", "ring", "LL", MB, 2, 4, LINK)
    with pytest.raises(KeyError):
        seconds("all_to_all", "ring", "LL", MB, 4, 2, LINK)
    with pytest.raises(KeyError):
        seconds("broadcast", "tree", "LL", MB, 4, 2, LINK)
    with pytest.raises(ValueError, match="twice: 4x2, 4x2"):
        table_text([(4, 2), (4, 2)], LINK)
