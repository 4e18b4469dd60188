"""The talk's formulas, and that the planner's steps are made of the same parts."""

from fractions import Fraction

import pytest

from netfold.plan.slots import Slots, one_shot, ring


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
