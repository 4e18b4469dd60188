"""Offsets between clocks, from operations alone, against offsets that are known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import Op, make_run, make_trace

from netfold.profile.clock_sync import ClockSync, synchronise_clocks
from netfold.profile.columns import columns_of
from netfold.profile.matching import match
from netfold.profile.run import Run

BASE_NS = 100_000_000_000  # `make_trace`: a clock that shows 0 ms


def clocks_of(run: Run) -> ClockSync:
    columns = columns_of(run)
    return synchronise_clocks(run, columns, match(run, columns).groups)


def simulated(offset_ms: list, count: int = 60, every_ms: float = 50, seed: int = 1, hosts: list | None = None) -> Run:
    """Consecutive barriers. All ranks begin within 1 ms and end 20 to 200 us after the last.

    offset_ms: by rank, a function of the true time in ms: how far the rank's clock is ahead.
    """
    rng = np.random.default_rng(seed)
    ops: list[list[Op]] = [[] for _ in offset_ms]
    for index in range(count):
        started = every_ms * index + rng.uniform(0, 1, len(offset_ms))
        finished = started.max() + rng.uniform(0.02, 0.2, len(offset_ms))
        for rank, shown in enumerate(offset_ms):
            begin, end = float(started[rank]), float(finished[rank])
            ops[rank].append(Op(begin + shown(begin), end + shown(end), 0, "barrier"))
    return make_run(
        *(
            make_trace(rank, len(ops), mine, host=None if hosts is None else hosts[rank])
            for rank, mine in enumerate(ops)
        )
    )


def test_two_operations_bound_two_clocks_from_both_sides() -> None:
    """Rank 1 shows 5 ms more. Truly: A: rank 0 in [0, 3], rank 1 in [2, 3]; B: rank 0 in [12, 14], rank 1 in [10, 13].

    Shown by rank 1: A in [7, 8], B in [15, 18]. With o what must be added to rank 1's times (truly -5):
      A: o <= finished_0 - started_1 = 3 - 7 = -4;   -o <= finished_1 - started_0 = 8 - 0, o >= -8
      B: o <= 14 - 15 = -1;                          o >= started_0 - finished_1 = 12 - 18 = -6
    So -6 <= o <= -4: the middle is -5, and 1 ms either way. Both lie around one knot in the middle of 14 ms: 100 ppm of
    the 7 ms to it, and of the 7 ms from it to wherever the offset is used, are 1.4 us more.
    """
    run = make_run(
        make_trace(0, 2, [Op(0, 3), Op(12, 14)]),
        make_trace(1, 2, [Op(2, 3), Op(10, 13)], clock_ms=5),
    )
    first, second = clocks_of(run).offsets(run)
    assert (first.offset_ns, first.bound_ns) == (0, 0)
    assert second.offset_ns == -5_000_000
    assert second.bound_ns == pytest.approx(1_001_400, abs=1)


@given(
    offsets=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_the_truth_lies_within_the_bound_of_any_constant_offsets(offsets: list[float], seed: int) -> None:
    """The last rank ends within 200 us of its start; 100 ppm of the 3 s that all of it takes are 300 us more."""
    run = simulated([lambda t: 0.0, *(lambda t, o=o: o for o in offsets)], seed=seed)
    clocks = clocks_of(run)
    assert clocks.contradiction_ns == 0
    for each, truth in zip(clocks.offsets(run)[1:], offsets, strict=True):
        assert each.bound_ns is not None and each.bound_ns < 0.5e6
        assert abs(each.offset_ns + truth * 1e6) <= each.bound_ns + 1


@given(
    drifts=st.lists(st.floats(-90e-6, 90e-6), min_size=1, max_size=3),
    bend=st.floats(-45e-6, 45e-6),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_clocks_that_drift_and_bend_are_followed_within_their_bounds(
    drifts: list[float], bend: float, seed: int
) -> None:
    """60 s: 90 ppm are 5 ms, far more than the 200 us that one operation leaves open."""

    def shown(drift: float):
        return lambda t: (
            1234.5 + (drift / 2 + bend) * t
            if t < 30_000
            else 1234.5 + (drift / 2 + bend) * 30_000 + (drift / 2 - bend) * (t - 30_000)
        )

    run = simulated([lambda t: 0.0, *map(shown, drifts)], count=300, every_ms=200, seed=seed)
    clocks = clocks_of(run)
    assert clocks.contradiction_ns == 0 and clocks.drift == 100e-6
    truth = np.linspace(100, 59_900, 500)
    for rank, drift in enumerate(drifts, 1):
        seen = np.array([round((t + shown(drift)(t)) * 1e6) for t in truth]) + BASE_NS
        expected = np.round(truth * 1e6) + BASE_NS
        error = clocks.errors_at(expected.astype(np.int64), 0, rank)
        assert (np.abs(clocks.align(rank, seen) - expected) <= error + 2).all()
        each = clocks.offsets(run)[rank]
        assert each.bound_ns is not None
        assert (np.abs(each.align(seen) - clocks.align(rank, seen)) <= 1).all(), "outside as inside"


def test_ranks_of_one_host_share_a_clock_and_its_bounds() -> None:
    run = simulated([lambda t: 0.0, lambda t: 0.0, lambda t: 70.0, lambda t: 70.0], hosts=["a", "a", "b", "b"])
    offsets = clocks_of(run).offsets(run)
    assert [each.offset_ns for each in offsets[:2]] == [0, 0] and offsets[1].bound_ns == 0
    assert offsets[2] != offsets[0] and offsets[2].offset_ns == offsets[3].offset_ns
    alone = simulated([lambda t: 0.0, lambda t: 70.0])
    assert offsets[2].bound_ns <= clocks_of(alone).offsets(alone)[1].bound_ns, "pairs of ranks bound more"


def test_clocks_are_bounded_through_a_third_rank() -> None:
    """0 meets 1, 1 meets 2; 0 and 2 never. The bounds of the two pairs add up."""
    groups = {"left": [0, 1], "right": [1, 2]}
    run = make_run(
        make_trace(0, 3, [Op(2, 3, group="left"), Op(10, 13, group="left")], groups={"left": [0, 1]}),
        make_trace(
            1,
            3,
            [Op(0, 3, group="left"), Op(12, 13, group="left"), Op(20, 22, group="right"), Op(32, 33, group="right")],
            groups=groups,
            clock_ms=100,
        ),
        make_trace(2, 3, [Op(21, 22, group="right"), Op(30, 33, group="right")], groups={"right": [1, 2]}, clock_ms=-7),
    )
    # 0 and 1: o_1 + 100 from start_0 - finish_1 = 2 - 3 = -1 up to finish_0 - start_1 = 13 - 12 = 1: 1 ms either way.
    # 1 and 2, likewise: from 32 - 33 = -1 up to 22 - 21 = 1. Together 2 ms.
    clocks = clocks_of(run)
    offsets = clocks.offsets(run)
    assert [each.offset_ns for each in offsets] == [0, -100_000_000, 7_000_000]
    assert offsets[1].bound_ns == pytest.approx(1e6, rel=0.01)
    assert offsets[2].bound_ns == pytest.approx(2e6, rel=0.01)


def test_a_rank_without_common_operations_has_no_bound() -> None:
    run = make_run(
        make_trace(0, 2, [Op(0, 1, operation="broadcast")]),
        make_trace(1, 2, [Op(0, 1, operation="broadcast")], clock_ms=1e7),
    )
    offset = clocks_of(run).offsets(run)[1]
    assert offset.bound_ns is None
    assert offset.offset_ns == -1e7 * 1e6


def test_a_stepped_clock_is_reported_and_not_smoothed() -> None:
    """At 30 s of 60 rank 1's clock jumps 4 ms ahead. Around it the bounds contradict one another by up to 4 ms less
    what is open in them; 1000 ppm make up for 4 ms within 4 s, so farther away the offsets are known."""
    run = simulated([lambda t: 0.0, lambda t: 0.0 if t < 30_000 else 4.0], count=600, every_ms=100)
    clocks = clocks_of(run)
    assert 3e6 < clocks.contradiction_ns < 4e6
    assert 0.02 < clocks.contradicted.mean() < 0.15
    assert clocks.offsets(run)[1].bound_ns is None
    at = np.array([5e9, 30e9, 55e9]).astype(np.int64) + BASE_NS
    assert np.isfinite(clocks.errors_at(at, 0, 1)).tolist() == [True, False, True]
    assert clocks.align(1, at[:1])[0] == pytest.approx(at[0], abs=3e5)
    assert clocks.align(1, at[2:] + 4_000_000)[0] == pytest.approx(at[2], abs=3e5)


def test_two_machines_of_one_name_contradict_one_another() -> None:
    run = simulated([lambda t: 0.0, lambda t: 50.0], hosts=["localhost", "localhost"])
    clocks = clocks_of(run)
    assert clocks.contradiction_ns > 45e6
    assert clocks.contradicted.all()


def test_many_hosts_that_contradict_one_another_stay_finite() -> None:
    steps = [(lambda t, r=r: 0.0 if t < 1500 else 20.0 * r) for r in range(40)]
    clocks = clocks_of(simulated(steps))
    assert clocks.contradicted.any() and np.isfinite(clocks.contradiction_ns)
    assert not np.isnan(clocks.errors_ns).any()
