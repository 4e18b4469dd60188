"""The rank that began last, and the time that others waited, against traces with hand-counted results."""

from __future__ import annotations

import numpy as np
import pytest
from traces import Op, Trace, make_run, make_trace

from netfold.profile.analyse import analyse
from netfold.profile.clock_sync import synchronise_clocks
from netfold.profile.columns import columns_of
from netfold.profile.matching import match
from netfold.profile.stragglers import WaitTimes, find_stragglers

MS = 1e-3


def waits(*traces: Trace) -> WaitTimes:
    run = make_run(*traces)
    columns = columns_of(run)
    groups = match(run, columns).groups
    return find_stragglers(run, columns, groups, synchronise_clocks(run, columns, groups))


def test_the_last_rank_is_named_with_the_waits_of_the_other_ranks() -> None:
    """One host, one clock. Starts:   first   second  third (a broadcast: no rank must wait)
    rank 0                            0       20      40
    rank 1                            3       20      41
    rank 2                            7       24      49
    First: rank 2 is last; 0 waited 7, 1 waited 4: 5.5 the mean of them. Second: rank 2 again: 4 and 4.
    """
    found = waits(
        make_trace(0, 3, [Op(0, 9), Op(20, 30), Op(40, 41, operation="broadcast")], host="a"),
        make_trace(1, 3, [Op(3, 9), Op(20, 30), Op(41, 42, operation="broadcast")], host="a"),
        make_trace(2, 3, [Op(7, 9), Op(24, 30), Op(49, 50, operation="broadcast")], host="a"),
    )
    assert [each.operations for each in found.ranks] == [2, 2, 2]
    assert [each.last for each in found.ranks] == [0, 0, 2]
    assert [each.waited_for_s for each in found.ranks] == pytest.approx([0, 0, 9.5 * MS])
    assert [each.waited_s for each in found.ranks] == pytest.approx([11 * MS, 8 * MS, 0])
    assert found.skew_s[0] == pytest.approx([7 * MS, 4 * MS, np.nan], nan_ok=True)
    assert found.skew_s[2] == pytest.approx([0, 0, np.nan], nan_ok=True)


def test_a_delay_within_the_clock_error_names_no_rank() -> None:
    """Two hosts, 10 s apart. The two operations in the middle end at once after they began, on both: by
    `finished_0 - started_1` and back clocks are known to 0.5 ms (0.5 + 0.5 apart, the middle exact). In the last one
    rank 1 begins 0.4 ms after rank 0: less than the clocks' error. In the first it begins 5 ms after: reported."""
    first = [Op(0, 9), Op(20, 20.5), Op(30, 30.5), Op(40, 49)]
    second = [Op(5, 9), Op(20, 20.5), Op(30, 30.5), Op(40.4, 49)]
    found = waits(make_trace(0, 2, first), make_trace(1, 2, second, clock_ms=10_000))
    assert [each.last for each in found.ranks] == [0, 1]
    assert found.ranks[1].waited_for_s == pytest.approx(5 * MS, rel=0.01)
    assert found.skew_s[0][1:] == pytest.approx([0, 0, 0])
    assert [each.operations for each in found.ranks] == [4, 4]
    exact = waits(make_trace(0, 2, first, host="a"), make_trace(1, 2, second, host="a"))
    assert [each.last for each in exact.ranks] == [0, 2]


def test_two_ranks_that_begin_last_together_are_not_named() -> None:
    """Rank 0 waited 6 ms all the same, for one of them: that is known."""
    found = waits(
        make_trace(0, 3, [Op(0, 9)], host="a"),
        make_trace(1, 3, [Op(6, 9)], host="a"),
        make_trace(2, 3, [Op(6, 9)], host="a"),
    )
    assert [each.last for each in found.ranks] == [0, 0, 0]
    assert [each.waited_s for each in found.ranks] == pytest.approx([6 * MS, 0, 0])


def test_without_a_clock_bound_ranks_are_not_compared() -> None:
    """A failed operation is no evidence of a straggler."""
    found = waits(
        make_trace(0, 2, [Op(0, 9, error="timeout")]),
        make_trace(1, 2, [Op(5, 9, error="timeout")], clock_ms=10),
    )
    assert [each.operations for each in found.ranks] == [0, 0]
    assert np.isnan(found.skew_s[0]).all()


def test_ranks_of_its_host_show_a_rank_whose_lateness_is_within_the_error_of_the_clocks() -> None:
    """8 hosts of 8 ranks. Rank 3 begins 1 ms after all others, every time, and all end 0.1 ms after it. By that, the
    clock of its host is known to no more than 0.6 ms either way."""
    count = 50
    traces = [
        make_trace(
            rank,
            64,
            [Op(10 * call + (rank == 3), 10 * call + 1.1) for call in range(count)],
            host=f"node-{rank // 8}",
            clock_ms=1000 * (rank // 8),
        )
        for rank in range(64)
    ]
    found = waits(*traces)
    late = found.ranks[3]
    assert (late.last, late.last_of_host, late.delays) == (0, count, count)
    assert late.host_waited_s == late.delay_s == pytest.approx(count * MS)
    assert late.waiting_ranks == "other ranks of its host"
    assert sum(each.delays for each in found.ranks) == count, "another rank is blamed"
    assert (found.operations, found.unnamed) == (count, count)
    assert found.error_s == pytest.approx(0.6 * MS, rel=0.1)
    (gap,) = [text for text in analyse(make_run(*traces)).coverage_gaps if "clocks" in text]
    assert gap.startswith("in 50 of 50 operations the last ranks of two hosts began within the error")
