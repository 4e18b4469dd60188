"""The estimate of exposed communication while a job runs, against stretches whose shape is known."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from netfold.profile.record import RECORD
from netfold.profile.recording import Member
from netfold.profile.run import GroupName
from netfold.profile.running import Running, _covered_ns

MS = 1_000_000
Between = list[tuple[float, float, bool]]


def computes(seconds: float) -> None:
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        sum(range(100))


def share(
    monkeypatch: pytest.MonkeyPatch, during: Callable[[], None], operations: Between, waited_s: float = 0.0
) -> float | None:
    """Of a stretch in which `during` ran, with operations from and to a part of it, inlined or not."""
    rows = np.zeros(len(operations), RECORD)
    group = Member(
        1, GroupName("world", "netfold"), 0, 2, lambda since: (len(rows[since:]) + since, rows[since:].tobytes())
    )
    there = [Member(1, group.group, 0, 2, lambda since: (0, b""))]
    monkeypatch.setattr("netfold.profile.running.members", lambda: there)
    running = Running()
    began_ns = time.perf_counter_ns()
    during()
    passed_ns = time.perf_counter_ns() - began_ns
    for row, (begins, ends, inlined) in zip(rows, operations, strict=True):
        row["started_ns"], row["finished_ns"] = began_ns + begins * passed_ns, began_ns + ends * passed_ns
        row["inlined"] = inlined
    there[0] = group
    return running.exposed_share(waited_s)


def test_a_thread_that_sleeps_under_an_operation_exposes_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert share(monkeypatch, lambda: time.sleep(0.2), [(0.0, 0.3, False), (0.2, 0.5, False)]) == pytest.approx(
        0.5, abs=0.05
    )


def test_a_thread_that_computes_exposes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = share(monkeypatch, lambda: computes(0.2), [(0.1, 0.9, False)])
    assert found is not None and found < 0.2


def test_what_ran_on_the_thread_itself_is_exposed_though_it_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = share(monkeypatch, lambda: computes(0.2), [(0.25, 0.5, True)])
    assert found == pytest.approx(0.25, abs=0.1)


def test_waiting_for_other_things_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    found = share(monkeypatch, lambda: time.sleep(0.2), [(0.0, 1.0, False)], waited_s=0.15)
    assert found == pytest.approx(0.25, abs=0.05)


def test_without_a_group_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netfold.profile.running.members", list)
    assert Running().exposed_share() is None


def test_overlapping_operations_count_once() -> None:
    rows = np.zeros(5, RECORD)
    # Distinct lengths, in no order; one lies within another, one began before the stretch, one ended before it.
    for row, (began, ended) in zip(rows, [(700, 830), (100, 400), (150, 201), (390, 500), (2, 7)], strict=True):
        row["started_ns"], row["finished_ns"] = began * MS, ended * MS
    assert _covered_ns(rows, 0) == (5 + 400 + 130) * MS
    assert _covered_ns(rows, 120 * MS) == (380 + 130) * MS
    assert _covered_ns(rows[:0], 0) == 0
