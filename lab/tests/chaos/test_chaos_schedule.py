"""Schedules are drawn from a seed alone, and stay within what the job under test must survive. No root."""

from __future__ import annotations

import itertools

from schedule import KIND_OF, KINDS, REST_S, SHAPES, Fault, draw

SEEDS = range(300)
SECONDS = 30.0


def test_equal_seeds_give_equal_schedules_and_other_seeds_give_others() -> None:
    assert draw(7, SECONDS) == draw(7, SECONDS)
    assert len({draw(seed, SECONDS).faults for seed in SEEDS}) == len(SEEDS)


def test_three_hundred_schedules_have_every_kind_at_every_place_and_every_variant() -> None:
    faults = [fault for seed in SEEDS for fault in draw(seed, SECONDS).faults]
    assert {(fault.kind, fault.place[0], fault.how) for fault in faults} == {
        (kind.name, place, how) for kind in KINDS for place in kind.places for how in kind.hows
    }
    assert {draw(seed, SECONDS).shape for seed in SEEDS} == set(SHAPES)
    assert {draw(seed, SECONDS).authenticated for seed in SEEDS} == {True, False}
    dying = [draw(seed, SECONDS).dies for seed in SEEDS]
    assert dying.count(None) in range(150, 270)


def test_faults_are_in_order_within_the_schedule_and_within_their_bounds() -> None:
    for seed in SEEDS:
        schedule = draw(seed, SECONDS)
        assert [fault.at_s for fault in schedule.faults] == sorted(fault.at_s for fault in schedule.faults)
        for fault in schedule.faults:
            kind = KIND_OF[fault.kind]
            assert 0 <= fault.at_s <= fault.end_s <= SECONDS + 0.01
            assert kind.for_s[0] - 0.01 <= fault.for_s <= kind.for_s[1] + 0.01
            assert kind.amounts[0] <= fault.amount <= kind.amounts[1]
            counts = {"switch": len(schedule.shape.parents), "host": schedule.shape.host_count}
            assert fault.place[1] < counts.get(fault.place[0], schedule.shape.ranks)


def test_paths_between_ranks_have_time_to_come_back_between_two_faults_that_halt_them() -> None:
    for seed in SEEDS:
        halting = [fault for fault in draw(seed, SECONDS).faults if KIND_OF[fault.kind].halts]
        for one, other in itertools.pairwise(halting):
            assert other.at_s >= one.end_s + REST_S


def test_a_schedule_of_chosen_kinds_has_no_other() -> None:
    assert {fault.kind for seed in SEEDS for fault in draw(seed, SECONDS, kinds=("ICMP", "lose")).faults} == {
        "ICMP",
        "lose",
    }


def test_the_text_of_a_fault_has_time_place_duration_and_variant() -> None:
    fault = Fault("cut switch", ("switch", 1), 3.0, 2.5, "udp, in")
    assert str(fault) == "  3.0 s: cut switch at switch 1 for 2.5 s (udp, in)"
