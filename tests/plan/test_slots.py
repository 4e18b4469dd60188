"""The talk's formulas, and that the planner's steps are made of the same parts."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest

from netfold.plan.cluster import load_cluster
from netfold.plan.job import Job, Split
from netfold.plan.model import Transformer
from netfold.plan.slots import Slots, one_shot, ring
from netfold.plan.step import Prediction
from netfold.plan.step import predict as predict_step
from netfold.tuning import DEFAULT_LINKS, Link, Topology
from netfold.tuning.cost import predict


def test_a_naive_pipeline_of_three_is_idle_two_thirds_of_the_time() -> None:
    slots = Slots(3)
    assert (slots.idle, slots.total, slots.idle_part) == (12, 18, Fraction(2, 3))


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8, 64])
def test_without_microbatches_all_but_one_stage_are_idle(stages: int) -> None:
    assert Slots(stages).idle_part == Fraction(stages - 1, stages)


@pytest.mark.parametrize("stages", [2, 8, 64])
@pytest.mark.parametrize("microbatches", [1, 2, 8, 256])
def test_steps_and_slots_are_the_talks(stages: int, microbatches: int) -> None:
    slots = Slots(stages, microbatches)
    assert slots.steps == 2 * (stages + microbatches - 1)
    assert slots.total == 2 * stages * (stages + microbatches - 1)
    assert slots.idle == 2 * stages * (stages - 1)
    assert slots.idle_part == Fraction(stages - 1, stages + microbatches - 1)


def test_idle_slots_go_to_a_half_and_a_fifth() -> None:
    assert float(Slots(1000, 1000).idle_part) == pytest.approx(0.5, abs=1e-3)
    assert float(Slots(1000, 4000).idle_part) == pytest.approx(0.2, abs=1e-3)


@pytest.mark.parametrize("ranks", [2, 3, 8, 512])
def test_a_ring_waits_for_each_step_and_a_one_shot_twice(ranks: int) -> None:
    assert ring(ranks).steps == ring(ranks).synchronisations == 2 * (ranks - 1)
    assert one_shot(ranks).steps == one_shot(ranks).synchronisations == 2
    assert ring(ranks).sent_part == one_shot(ranks).sent_part == Fraction(2 * (ranks - 1), ranks)


@pytest.mark.parametrize("ranks", [2, 8, 512])
def test_the_ring_by_hand_is_the_cost_models(ranks: int) -> None:
    assert _seconds("all_reduce", "ring", ranks, latency_s=1.0) == ring(ranks).steps
    assert _seconds("all_reduce", "ring", ranks, bytes_per_s=1.0) == pytest.approx(float(ring(ranks).sent_part))


@pytest.mark.parametrize("ranks", [2, 8, 512])
def test_the_one_shot_by_hand_is_the_cost_models_two_halves(ranks: int) -> None:
    halves = [(half, "direct", ranks) for half in ("reduce_scatter", "all_gather")]
    assert sum(_seconds(*half, latency_s=1.0) for half in halves) == one_shot(ranks).steps
    sent = sum(_seconds(*half, bytes_per_s=1.0) for half in halves)
    assert sent == pytest.approx(float(one_shot(ranks).sent_part))


@pytest.mark.parametrize("ranks", [2, 8, 512])
def test_arithmetic_in_switches_takes_two_steps_and_the_tensor_once(ranks: int) -> None:
    assert _seconds("all_reduce", "in_network", ranks, latency_s=1.0) == one_shot(ranks).steps
    assert _seconds("all_reduce", "in_network", ranks, bytes_per_s=1.0) == 1


@pytest.mark.parametrize(("optimizer", "times"), [("sgd", 2), ("momentum", 4), ("adam", 6)])
def test_an_optimizer_needs_two_to_six_times_the_weights(optimizer: str, times: int) -> None:
    memory = _step(Job(8, 1, Split(data=8), optimizer=optimizer)).memory
    assert memory.optimizer == pytest.approx(times * memory.weights)


def test_a_distributed_optimizer_has_a_part_of_the_work_and_of_the_state() -> None:
    whole, part = (_step(Job(8, 1, Split(data=8, zero=level))) for level in (0, 1))
    assert part.optimizer_s == pytest.approx(whole.optimizer_s / 8)
    assert part.memory.optimizer == pytest.approx(whole.memory.optimizer / 8)


def _seconds(
    operation: str, algorithm: str, ranks: int, *, latency_s: float = 0.0, bytes_per_s: float = math.inf
) -> float:
    """Of one byte, so that steps and parts can be read off."""
    links = replace(
        DEFAULT_LINKS,
        switches=(bytes_per_s,),  # a port a worker
        network=Link(latency_s, bytes_per_s),
        reduce_bytes_per_s=math.inf,
        message_s=0.0,
        crowding=0.0,
    )
    return predict(operation, algorithm, 1.0, Topology.apart(ranks), links, switch=True)


def _step(job: Job) -> Prediction:
    return predict_step(Transformer("GPT", 1024, 16, 24, 1024), load_cluster("dgx-a100"), job)
