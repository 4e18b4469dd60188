"""Communication that computing hides, and exposed communication, against traces with hand-counted results."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import Op, make_run, make_trace

from netfold.profile.overlap import find_overlap, mean_overlap, step_times

MS = 1e-3


def test_idle_time_is_exposed_and_divided_among_operations_under_way() -> None:
    """0        10        20        30        40        50
    A           [===================]                        10..30
    B                     [===================]              20..40
    computing   |----5----|----5----|---10----|              0..10: 10, 10..20: 5, 20..30: 5, 30..40: 10, 40..50: 0

    Communication 30 ms. Exposed: 5 in 10..20 (A alone), 5 in 20..30 (A and B, half each), 0 in 30..40: 10 ms.
    A: 5 + 2.5, B: 2.5. From 40 on nothing communicates, so the idle 10 ms are not exposed.
    """
    trace = make_trace(
        0,
        1,
        [Op(10, 30), Op(20, 40)],
        progress_ms=[(0, 0), (10, 10), (20, 15), (30, 20), (40, 30), (50, 30)],
        steps_ms=[(0, 25), (25, 50)],
    )
    run = make_run(trace)
    exposure = find_overlap(trace)
    assert exposure.of_operations(trace) == pytest.approx([7.5 * MS, 2.5 * MS])
    assert exposure.unwatched_s == 0
    whole = mean_overlap(run, [exposure])
    assert whole.wall_s == pytest.approx(50 * MS)
    assert whole.communication_s == pytest.approx(30 * MS)
    assert whole.exposed_s == pytest.approx(10 * MS)
    assert whole.overlap_ratio == pytest.approx(2 / 3)
    steps = step_times(run, [exposure])
    assert steps is not None and steps.count == 2
    # 0..25: 15 ms of communication, 5 + 2.5 exposed; 25..50: 15 and 2.5. Two values: percentiles are interpolated.
    assert steps.wall_s == pytest.approx((25 * MS, 25 * MS, 25 * MS))
    assert steps.communication_s == pytest.approx((15 * MS, 15 * MS, 15 * MS))
    assert steps.exposed_s == pytest.approx((5 * MS, 2.75 * MS, 7.25 * MS))


def test_computing_between_two_lines_is_spread_over_all_of_the_time_between_them() -> None:
    """Lines at 0 and 100 with 40 ms of computing: 60% idle. An operation from 10 to 20 has 6 ms of that."""
    trace = make_trace(0, 1, [Op(10, 20)], progress_ms=[(0, 0), (100, 40)])
    assert find_overlap(trace).of_operations(trace) == pytest.approx([6 * MS])


def test_more_computing_than_time_hides_all_communication() -> None:
    """The thread's clock and the wall's are read one after the other: 12 ms in 10 are 10."""
    trace = make_trace(0, 1, [Op(0, 20)], progress_ms=[(0, 0), (10, 12), (20, 12)])
    assert find_overlap(trace).of_operations(trace) == pytest.approx([10 * MS])


def test_unwatched_time_counts_as_exposed_and_is_reported() -> None:
    """Watched from 10 to 20, computing: of the operation's 30 ms 20 are exposed, all of them unwatched."""
    trace = make_trace(0, 1, [Op(0, 30)], progress_ms=[(10, 0), (20, 10)])
    exposure = find_overlap(trace)
    assert exposure.of_operations(trace) == pytest.approx([20 * MS])
    assert exposure.unwatched_s == pytest.approx(20 * MS)


def test_without_progress_lines_exposed_time_is_unknown() -> None:
    bare = make_trace(1, 2, [Op(0, 10)], steps_ms=[(0, 20)])
    assert find_overlap(bare).of_operations(bare) is None
    alone = make_run(bare)
    assert mean_overlap(alone, [find_overlap(bare)]).exposed_s is None
    assert mean_overlap(alone, [find_overlap(bare)]).overlap_ratio is None
    found = step_times(alone, [find_overlap(bare)])
    assert found is not None and found.exposed_s is None
    # With a sampled rank beside it (30 ms, 15 of them hidden) the ratio is only that rank's.
    watched = make_trace(0, 2, [Op(0, 30)], progress_ms=[(0, 0), (30, 15)])
    whole = mean_overlap(make_run(watched, bare), [find_overlap(watched), find_overlap(bare)])
    assert whole.communication_s == pytest.approx(20 * MS)
    assert whole.exposed_s == pytest.approx(15 * MS)
    assert whole.overlap_ratio == pytest.approx(0.5)


def test_an_empty_run_has_no_time() -> None:
    trace = make_trace(0, 1)
    assert mean_overlap(make_run(trace), [find_overlap(trace)]).communication_s == 0
    assert step_times(make_run(trace), [find_overlap(trace)]) is None
    assert mean_overlap(make_run(), []).wall_s == 0


@given(
    spans=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), min_size=1, max_size=8),
    busy=st.lists(st.integers(0, 12), min_size=1, max_size=8),
)
@settings(max_examples=200, deadline=None)
def test_operations_add_up_to_the_total_found_by_counting(spans: list[tuple[int, int]], busy: list[int]) -> None:
    """Against a plain count, millisecond by millisecond; lines of progress every 10 ms."""
    progress = [(10 * index, sum(busy[:index])) for index in range(len(busy) + 1)]
    trace = make_trace(0, 1, [Op(begun, begun + length) for begun, length in spans], progress_ms=progress)
    exposure = find_overlap(trace)
    communicated, exposed = 0, 0.0
    for at in range(100):
        if any(begun <= at < begun + length for begun, length in spans):
            communicated += 1
            exposed += max(0.0, 1 - busy[at // 10] / 10) if at < 10 * len(busy) else 1.0
    assert exposure.communicated[-1] == pytest.approx(communicated * MS)
    assert exposure.exposed is not None and exposure.exposed[-1] == pytest.approx(exposed * MS)
    shares = exposure.of_operations(trace)
    assert shares is not None and np.sum(shares) == pytest.approx(exposed * MS)
