"""An all_reduce simulated packet by packet: equal to the formula without losses, and the cost of losses."""

from statistics import mean, median

import pytest

from netfold_plan import packets
from netfold_plan.packets import Fabric, all_reduce

pytestmark = pytest.mark.native

GIGABIT = 125e6
MB = 2**20


@pytest.mark.parametrize("rate", [25e6, GIGABIT, 1.25e9])
@pytest.mark.parametrize("workers", [2, 8, 32])
def test_without_losses_the_simulated_time_equals_the_formula(rate, workers):
    found = all_reduce(Fabric(workers, rate, 10e-6), 4 * MB / workers)
    # The first packet and the last are stored before they go on, which the formula leaves out.
    packets = 2 * 1522 / rate
    assert found.closed_s <= found.time_s <= 1.01 * found.closed_s + packets
    assert found.sent_again == found.timeouts == 0


def test_a_tree_adds_one_hop_in_each_direction():
    one, tree = (all_reduce(Fabric(16, GIGABIT, 50e-6, racks), MB // 4) for racks in (1, 4))
    assert tree.time_s - one.time_s == pytest.approx(2 * (50e-6 + 1522 / GIGABIT), rel=1e-3)
    assert tree.closed_s - one.closed_s == pytest.approx(2 * 50e-6)


def test_a_window_below_the_bandwidth_delay_product_limits_the_rate():
    fabric = Fabric(4, GIGABIT, 1e-3, window_bytes=100 * 1408)
    assert all_reduce(fabric, MB).time_s == pytest.approx(MB / (100 * 1408) * 2e-3, rel=0.15)


def test_bytes_beyond_the_simulated_part_pass_at_the_steady_rate():
    fabric = Fabric(4, GIGABIT, 50e-6)
    whole, part = (all_reduce(fabric, 2 * MB, most_packets=packets) for packets in (200_000, 2_000))
    assert part.time_s == pytest.approx(whole.time_s, rel=1e-4)
    assert "the pace of the middle continues for the other" in part.said and "pace" not in whole.said


@pytest.mark.parametrize(
    ("workers", "racks", "levels"), [(256, 1, 1), (4096, 16, 2), (60_000, 240, 2), (102_400, 400, 3)]
)
def test_time_depends_on_workers_only_by_the_levels_of_switches(workers, racks, levels):
    found = all_reduce(Fabric(workers, 12.5e9, 1e-6, racks), 64 * 1024, most_packets=10_000)
    alone = all_reduce(Fabric(2, 12.5e9, 1e-6), 64 * 1024)
    # Virtual time has whole nanoseconds.
    assert found.time_s - alone.time_s == pytest.approx(2 * (levels - 1) * (1e-6 + 1522 / 12.5e9), rel=0.02, abs=5e-9)


def test_simulated_losses_cost_as_much_as_measured_in_the_rack():
    """4 hosts at 200 Mbit/s, 16 MB, a loss of 0.1% and 1%: 1.003 and 1.047 times as long in the median, 0.29% and 2.63%
    sent again (lab/bench/results/loss.md)."""
    calm = all_reduce(lossy(0), 16 * MB, most_packets=1000)
    for loss, longer, again in ((1e-3, 1.003, 0.0029), (1e-2, 1.047, 0.0263)):
        found = [all_reduce(lossy(loss), 16 * MB, seed=seed, most_packets=20_000) for seed in range(3)]
        assert median(each.time_s for each in found) == pytest.approx(longer * calm.time_s, rel=0.05)
        assert median(each.sent_again for each in found) == pytest.approx(again, rel=0.3)


def lossy(loss):
    return Fabric(4, 25e6, 100e-6, loss=loss)


def test_few_workers_with_the_losses_of_many_retransmit_as_much(monkeypatch):
    fabric = Fabric(32, GIGABIT, 100e-6, racks=4, loss=1e-3)
    whole = [all_reduce(fabric, MB, seed=seed) for seed in range(4)]
    monkeypatch.setattr(packets, "MOST_WORKERS", 8)
    composed = [all_reduce(fabric, MB, seed=seed) for seed in range(4)]
    said = "8 workers in 2 racks, 745 packets each; each stands for 4 of 32, with the losses"
    assert all(each.said.startswith(said) for each in composed)
    assert mean(each.sent_again for each in composed) == pytest.approx(mean(each.sent_again for each in whole), rel=0.3)


def test_the_same_seed_loses_the_same_packets():
    fabric = Fabric(4, GIGABIT, 50e-6, loss=0.01)
    assert all_reduce(fabric, MB // 4, seed=5) == all_reduce(fabric, MB // 4, seed=5)
    assert all_reduce(fabric, MB // 4, seed=5) != all_reduce(fabric, MB // 4, seed=6)


def test_an_impossible_packet_configuration_is_refused_in_a_sentence():
    with pytest.raises(
        ValueError, match="257 workers are too many for one switch, which takes 256; spread them over 2"
    ):
        Fabric(257, GIGABIT, 1e-6)
    with pytest.raises(ValueError, match="10 workers cannot be spread evenly over 4 racks"):
        Fabric(10, GIGABIT, 1e-6, racks=4)
    with pytest.raises(ValueError, match=r"a loss of 0\.5 is too high"):
        Fabric(4, GIGABIT, 1e-6, loss=0.5)
    with pytest.raises(ValueError, match="a link has a rate above 0"):
        Fabric(4, 0, 1e-6)
