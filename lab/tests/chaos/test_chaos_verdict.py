"""The verdict catches each violation that is planted into the record of a correct run. No root."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from schedule import SHAPES, Fault, Schedule
from verdict import (
    FALLBACK_S,
    MORE_BYTES,
    MORE_DESCRIPTORS,
    NAMED_S,
    STEP_S,
    Failure,
    RankRecord,
    Record,
    Step,
    Usage,
    problems,
)

CUT = Fault("cut switch", ("switch", 0), 2.5, 3.0, "udp, in")
SCHEDULE = Schedule(1, 10.0, SHAPES[0], False, (CUT,), None)
DIES = dataclasses.replace(SCHEDULE, dies=2)
KILLED_S = 10.0


def good() -> Record:
    """Three ranks of 100 steps of 0.1 s each, beside a cut of 3 s."""
    steps = [Step(number, number / 10, (number + 1) / 10, 0) for number in range(100)]
    ranks = [RankRecord(list(steps), ended=True) for _ in range(3)]
    return Record(ranks, 1.0, [(2.5, 5.5)], [Usage("rank0", (50, 55), (1 << 28, 1 << 28))])


def good_with_a_death() -> Record:
    record = good()
    record.killed_s = KILLED_S
    for rank in range(3):
        record.ranks[rank].ended = False
    for rank in range(2):
        record.ranks[rank].failure = Failure("PeerLost", "rank 2 is gone", KILLED_S + 1)
    return record


def test_runs_without_fault_pass() -> None:
    assert problems(SCHEDULE, good()) == []
    assert problems(DIES, good_with_a_death()) == []


def took(record: Record, rank: int, number: int, seconds: float) -> None:
    step = record.ranks[rank].steps[number]
    record.ranks[rank].steps[number] = dataclasses.replace(step, ended_s=step.began_s + seconds)


def wrong_sum(record: Record) -> None:
    record.ranks[1].steps[40] = dataclasses.replace(record.ranks[1].steps[40], wrong=1)


def hang_far_from_a_fault(record: Record) -> None:
    took(record, 0, 0, STEP_S + 0.1)


def hang_beside_a_fault(record: Record) -> None:
    took(record, 0, 30, STEP_S + FALLBACK_S + 0.1)


def hang_for_good(record: Record) -> None:
    record.ranks[2].ended = False


def failed(record: Record) -> None:
    record.ranks[0].failure = Failure("CollectiveTimeout", "all_reduce timed out", 4.0)


def step_left_out(record: Record) -> None:
    del record.ranks[1].steps[50]


def fewer_steps(record: Record) -> None:
    del record.ranks[1].steps[-1]


def descriptors(record: Record) -> None:
    record.usage.append(Usage("switch0", (40, 41 + MORE_DESCRIPTORS), (0, 0)))


def memory(record: Record) -> None:
    record.usage.append(Usage("switch0", (40, 40), (0, MORE_BYTES + 1)))


def ended_alone(record: Record) -> None:
    record.ended_alone.append("switch0 (exit code -11)")


def admitted(record: Record) -> None:
    record.admitted = 1


def traceback(record: Record) -> None:
    record.log_errors.append("switch0: KeyError: 3")


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (wrong_sum, "wrong sum: rank 1, step 40"),
        (hang_far_from_a_fault, "hang: rank 0, step 0 took"),
        (hang_beside_a_fault, "hang: rank 0, step 30 took"),
        (hang_for_good, "hang: rank 2 did not end; its last was step 99"),
        (failed, "lost step: rank 0 failed at 4.0 s: CollectiveTimeout"),
        (step_left_out, "lost step: rank 1 took steps [51"),
        (fewer_steps, "lost step: the ranks took [100, 99, 100] steps"),
        (descriptors, "grown: switch0 has"),
        (memory, "grown: switch0 holds"),
        (ended_alone, "died: switch0"),
        (admitted, "admitted: 1 peers"),
        (traceback, "log: switch0: KeyError"),
    ],
)
def test_a_planted_defect_is_caught(plant: Callable[[Record], None], found: str) -> None:
    record = good()
    plant(record)
    assert any(problem.startswith(found) for problem in problems(SCHEDULE, record)), problems(SCHEDULE, record)


def unnamed(record: Record) -> None:
    record.ranks[0].failure = Failure("PeerLost", "the group ended", KILLED_S + 1)


def silent(record: Record) -> None:
    record.ranks[0].failure = None


def learned_late(record: Record) -> None:
    record.ranks[0].failure = Failure("PeerLost", "rank 2 is gone", KILLED_S + NAMED_S + 0.1)


def failed_before(record: Record) -> None:
    record.ranks[0].failure = Failure("PeerLost", "rank 2 is gone", KILLED_S - 1)


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (unnamed, "unnamed: rank 0 says"),
        (silent, "unnamed: rank 0 raised nothing"),
        (learned_late, "unnamed: rank 0 learned of it after 5.1 s"),
        (failed_before, "lost step: rank 0 failed at 9.0 s"),
    ],
)
def test_an_unreported_death_of_a_rank_is_caught(plant: Callable[[Record], None], found: str) -> None:
    record = good_with_a_death()
    plant(record)
    assert any(problem.startswith(found) for problem in problems(DIES, record)), problems(DIES, record)


def test_a_halting_fault_excuses_delays_only_during_its_own_time() -> None:
    stop = Fault("stop rank", ("rank", 1), 2.5, 3.0)
    schedule = dataclasses.replace(SCHEDULE, faults=(stop,))
    record = good()
    took(record, 0, 30, 6.0)
    assert problems(schedule, record) == []
    took(record, 0, 30, STEP_S + FALLBACK_S + 2 * 3.0 + 0.1)
    assert any(problem.startswith("hang") for problem in problems(schedule, record))
