"""The estimate of exposed communication while a job runs, against intervals with known computing."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from netfold.profile.live import LiveOverlap, _covered_ns
from netfold.profile.record import RECORD
from netfold.profile.recording import Member
from netfold.profile.run import GroupName

MS = 1_000_000
Between = list[tuple[float, float, bool]]


class Clock:
    """The time, and the kernel's account of the thread; only the test moves them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns, self.busy_ns = 5_000 * MS, 700 * MS
        monkeypatch.setattr("netfold.profile.live.time", SimpleNamespace(perf_counter_ns=lambda: self.now_ns))
        monkeypatch.setattr(LiveOverlap, "_busy", lambda running: self.busy_ns)

    def sleeps(self, ms: int) -> None:
        self.now_ns += ms * MS

    def computes(self, ms: int) -> None:
        self.now_ns += ms * MS
        self.busy_ns += ms * MS


def share(
    monkeypatch: pytest.MonkeyPatch, during: Callable[[Clock], None], operations: Between, waited_s: float = 0.0
) -> float | None:
    """Of a stretch in which `during` ran, with operations from and to a part of it, inlined or not."""
    rows = np.zeros(len(operations), RECORD)
    group = Member(
        1, GroupName("world", "netfold"), 0, 2, lambda since: (len(rows[since:]) + since, rows[since:].tobytes())
    )
    there = [Member(1, group.group, 0, 2, lambda since: (0, b""))]
    monkeypatch.setattr("netfold.profile.live.members", lambda: there)
    clock = Clock(monkeypatch)
    running = LiveOverlap()
    began_ns = clock.now_ns
    during(clock)
    passed_ns = clock.now_ns - began_ns
    for row, (begins, ends, inlined) in zip(rows, operations, strict=True):
        row["started_ns"], row["finished_ns"] = began_ns + begins * passed_ns, began_ns + ends * passed_ns
        row["inlined"] = inlined
    there[0] = group
    return running.exposed_share(waited_s)


def test_a_thread_that_sleeps_under_an_operation_exposes_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    operations = [(0.0, 0.3, False), (0.2, 0.5, False)]
    assert share(monkeypatch, lambda clock: clock.sleeps(200), operations) == pytest.approx(0.5)


def test_a_thread_that_computes_exposes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert share(monkeypatch, lambda clock: clock.computes(200), [(0.1, 0.9, False)]) == 0


def test_exposed_time_is_at_most_the_idle_time_of_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def half(clock: Clock) -> None:
        clock.computes(120)
        clock.sleeps(80)

    assert share(monkeypatch, half, [(0.1, 0.9, False)]) == pytest.approx(0.4)


def test_operations_on_the_thread_itself_are_exposed_while_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = share(monkeypatch, lambda clock: clock.computes(200), [(0.25, 0.5, True)])
    assert found == pytest.approx(0.25)


def test_other_waiting_time_is_subtracted(monkeypatch: pytest.MonkeyPatch) -> None:
    found = share(monkeypatch, lambda clock: clock.sleeps(200), [(0.0, 1.0, False)], waited_s=0.15)
    assert found == pytest.approx(0.25)


def test_an_early_call_returns_the_last_estimate_and_its_waiting_time_counts_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = np.zeros(1, RECORD)
    rows["started_ns"], rows["finished_ns"] = 5_000 * MS, 6_000 * MS
    group = Member(1, GroupName("world", "netfold"), 0, 2, lambda since: (1, rows.tobytes()))
    monkeypatch.setattr("netfold.profile.live.members", lambda: [group])
    clock, running = Clock(monkeypatch), LiveOverlap()
    clock.sleeps(100)
    assert running.exposed_share(0.05, every_s=0.2) is None
    clock.sleeps(100)
    assert running.exposed_share(0.01, every_s=0.2) == pytest.approx(0.7)
    clock.computes(100)
    assert running.exposed_share(every_s=0.2) == pytest.approx(0.7)
    clock.computes(100)
    assert running.exposed_share(every_s=0.2) == 0


def test_busy_time_counts_computing_and_not_sleep() -> None:
    """Time in the queue for a core counts as computing and sleep does not, so these bounds hold under any load."""
    busy = LiveOverlap()._busy
    began_ns, before_ns = time.perf_counter_ns(), busy()
    if before_ns is None:
        pytest.skip("this kernel does not say how long a thread ran and queued (/proc/self/task/*/schedstat)")
    until_ns = time.thread_time_ns() + 50 * MS
    while time.thread_time_ns() < until_ns:
        sum(range(100))
    time.sleep(0.2)
    passed_ns, busy_ns = time.perf_counter_ns() - began_ns, (busy() or 0) - before_ns
    assert 45 * MS < busy_ns < passed_ns - 195 * MS


def test_without_a_group_there_is_no_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netfold.profile.live.members", list)
    assert LiveOverlap().exposed_share() is None


def test_overlapping_operations_count_once() -> None:
    rows = np.zeros(5, RECORD)
    # Distinct lengths, in no order; one lies within another, one began before the stretch, one ended before it.
    for row, (began, ended) in zip(rows, [(700, 830), (100, 400), (150, 201), (390, 500), (2, 7)], strict=True):
        row["started_ns"], row["finished_ns"] = began * MS, ended * MS
    assert _covered_ns(rows, 0) == (5 + 400 + 130) * MS
    assert _covered_ns(rows, 120 * MS) == (380 + 130) * MS
    assert _covered_ns(rows[:0], 0) == 0
