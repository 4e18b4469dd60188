"""Leaves and a root over an arbitrary network on every link; sim/tree.py has the checks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_simulated_network import deliveries, jobs, reorderings, schedules

from netfold._native import protocol
from netfold_plan.sim.__main__ import main
from netfold_plan.sim.harness import Operation
from netfold_plan.sim.network import DELIVERED, LOST, SWITCH, ListedDeliveries, address_of
from netfold_plan.sim.scenario import Scenario
from netfold_plan.sim.simulation import Simulation, SimulationError

pytestmark = pytest.mark.native


@st.composite
def trees(draw, **lengths):
    job = draw(jobs(most=3, **lengths))
    leaves = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    return {**job, "workers": sum(leaves), "leaves": leaves}


@given(trees(), schedules(deliveries))
def test_the_sum_is_right_whatever_happens_on_any_link(job, schedule):
    Simulation(**job, deliveries=ListedDeliveries(schedule)).run()


@given(trees(), schedules(reorderings))
def test_the_sum_is_right_when_duplicates_come_rounds_later(job, schedule):
    Simulation(**job, deliveries=ListedDeliveries(schedule)).run()


@pytest.mark.parametrize("leaves", ["1,1", "2,2", "1,3,2"])
@pytest.mark.parametrize("seed", range(8))
def test_long_runs_over_lossy_links(leaves, seed):
    workers = sum(map(int, leaves.split(",")))
    scenario = Scenario(seed=seed, workers=workers, leaves=leaves, window=8, operations=8, loss=0.05, straggle_ms=1.0)
    scenario.simulation().run()


def fates_of_uplinks(loses):
    """Return fates that lose packets between leaf and root. loses: (direction, number of the packet in it)."""
    counts = {}

    def fate(packet):
        if packet.source >= 0 or packet.to >= 0:
            return DELIVERED
        direction = (packet.source, packet.to)
        counts[direction] = counts.get(direction, 0) + 1
        return LOST if (direction, counts[direction]) in loses else DELIVERED

    return fate


def run_long(loses):
    simulation = Simulation(
        workers=4,
        window=16,
        payload_bytes=8,
        operations=[Operation(0, 400, "i32")],
        deliveries=fates_of_uplinks(loses),
        leaves=(2, 2),
    )
    return simulation, simulation.run()


LEAF = address_of(0)


@pytest.mark.parametrize("direction", [(LEAF, SWITCH), (SWITCH, LEAF)], ids=["sum", "result"])
def test_a_loss_between_leaf_and_root_is_repaired_without_any_timer(direction):
    simulation, summary = run_long({(direction, 40)})
    assert summary.timeouts == 0
    assert simulation.harness.sums_resent == 1
    assert summary.retransmissions == 0, "the workers send nothing again"


def test_a_packet_that_is_lost_twice_is_repaired_end_to_end():
    # The result, and its retransmission.
    simulation, summary = run_long({((SWITCH, LEAF), number) for number in range(40, 60)})
    assert simulation.harness.sums_resent > 1
    assert summary.retransmissions > 0


def test_without_losses_a_chunk_crosses_each_link_once():
    simulation, summary = run_long(set())
    assert simulation.harness.sums_resent == 0
    # 4 workers and 2 leaves send and receive 200 chunks each.
    assert summary.packets["sent"] == 2 * 6 * 200


def test_4096_workers_over_16_leaves_get_the_same_sum():
    operations = [Operation(0, 20, "f32"), Operation(1, 20, "i32")]
    how = {"workers": 4096, "leaves": (256,) * 16, "window": 2, "payload_bytes": 64, "operations": operations}
    summary = Simulation(**how, deliveries=lambda packet: DELIVERED).run()
    # Two chunks for each operation, from and to each worker and leaf.
    assert summary.packets["sent"] == 2 * 4 * (4096 + 16)


def test_a_wrong_sum_of_a_leaf_is_found(monkeypatch):
    class WrongSums(protocol.SwitchJob):
        def sum(self, slot, packet_number):
            right = super().sum(slot, packet_number)
            return right[:-1] + bytes([right[-1] ^ 1])

    monkeypatch.setattr(protocol, "SwitchJob", WrongSums)
    with pytest.raises(SimulationError, match="sends a wrong sum of chunk 0 up"):
        run_long(set())


def test_a_tree_is_replayed_and_drawn_by_the_command_that_a_failure_names(capsys):
    scenario = Scenario(seed=3, workers=2, leaves="1,1", operations=1, max_elements=4)
    command = scenario.command()
    assert command == "python -m netfold_plan.sim --seed 3 --workers 2 --operations 1 --max-elements 4 --leaves 1,1"
    assert main([*command.split()[3:], "--diagram"]) == 0
    drawn = capsys.readouterr().out.splitlines()
    assert drawn[0].split() == ["worker", "0", "worker", "1", "leaf", "0", "leaf", "1", "switch"]
    assert any("summed" in line for line in drawn)


def test_leaves_with_another_number_of_workers_are_refused():
    with pytest.raises(ValueError, match="leaves 1,1 have 2 workers below them, not 3"):
        Scenario(workers=3, leaves="1,1")
