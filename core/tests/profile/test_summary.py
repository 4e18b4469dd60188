"""The table's numbers: sizes, bandwidths, means and unknown values, counted by hand."""

from __future__ import annotations

import pytest
from traces import KB, MB, PROFILER, Op, Trace, make_run, make_trace, training

from netfold.profile.analyse import analyse
from netfold.profile.findings import Row

MS = 1e-3


def rows_of(*traces: Trace, buckets: list[int] | None = None) -> dict[tuple[str, int], Row]:
    run = make_run(*traces)
    findings = analyse(run) if buckets is None else analyse(run, buckets)
    return {(row.operation, row.above_bytes): row for row in findings.rows}


def test_one_row_equals_hand_counted_values() -> None:
    """Two ranks, all_reduces of 1 MB: rank 0 takes 10, 20 and 30 ms, rank 1 20, 20 and 40 (the last two queued 5 ms).

    A rank's: 3 operations, 3 MB, 70 ms ((60 + 80) / 2), 5 ms in the queue ((0 + 10) / 2). Mean 140 / 6. The 50th
    percentile of 10 20 20 20 30 40 is 20; the 99th 40 - 0.05 * 10 = 39.5. algbw 6 MB / 140 ms; busbw: 2 (2-1) / 2 = 1.
    """
    rows = rows_of(
        make_trace(0, 2, [Op(0, 10), Op(20, 40), Op(50, 80)], host="a"),
        make_trace(1, 2, [Op(0, 20), Op(20, 40, queued_ms=15), Op(50, 90, queued_ms=45)], host="a"),
    )
    row = rows["all_reduce", 128 * KB]
    assert row.to_bytes == 16 * MB
    assert (row.count, row.bytes) == (3, 3 * MB)
    assert row.total_s == pytest.approx(70 * MS)
    assert row.queue_s == pytest.approx(5 * MS)
    assert (row.mean_s, row.p50_s, row.p99_s) == pytest.approx((140 / 6 * MS, 20 * MS, 39.5 * MS))
    assert row.algbw == pytest.approx(6 * MB / 0.14)
    assert row.busbw == pytest.approx(row.algbw)
    assert row.share == 1
    assert row.exposed_s is None, "the thread was not watched"
    assert row.skew_s == 0
    assert row.algorithms == {"ring": 6} and row.wires == {"f32": 6}


def test_buckets_include_their_upper_ends_and_one_is_above_all() -> None:
    sizes = [0, 1, 128 * KB, 128 * KB + 1, 64 * MB, 64 * MB + 1]
    run = [make_trace(0, 1, [Op(index, index + 1, size) for index, size in enumerate(sizes)])]
    rows = rows_of(*run)
    assert {key: row.count for key, row in rows.items()} == {
        ("all_reduce", 0): 3,
        ("all_reduce", 128 * KB): 1,
        ("all_reduce", 32 * MB): 1,
        ("all_reduce", 64 * MB): 1,
    }
    assert rows["all_reduce", 64 * MB].to_bytes is None
    own = rows_of(*run, buckets=[1])
    assert {key: row.count for key, row in own.items()} == {("all_reduce", 0): 2, ("all_reduce", 1): 4}
    for wrong in ([], [0, 1], [2, 1], [1, 1]):
        with pytest.raises(ValueError, match="ascending"):
            analyse(make_run(*run), wrong)


@pytest.mark.parametrize(
    ("operation", "whole", "factor"),
    [
        ("all_reduce", 1, 1.5),  # 2 (4-1) / 4
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 4, 0.75),
        ("all_to_all", 4, 0.75),
        ("scatter", 4, 1),
        ("broadcast", 1, 1),
        ("reduce", 1, 1),
        ("send", 1, 1),
    ],
)
def test_sizes_and_bus_factors_equal_nccl_tests(operation: str, whole: int, factor: float) -> None:
    """A record of 1 MB in a group of 4 in a job of 6: the group's P counts."""
    groups = {"four": range(4)}
    row = rows_of(make_trace(0, 6, [Op(0, 1, MB, operation, group="four")], groups=groups))[operation, 128 * KB]
    assert row.bytes == whole * MB
    assert row.algbw == pytest.approx(whole * MB / MS)
    assert row.busbw == pytest.approx(factor * row.algbw)


def test_all_ranks_of_a_gather_have_the_roots_size() -> None:
    ops = [[Op(0, 1, MB if rank == 1 else 0, "gather")] for rank in range(3)]
    rows = rows_of(*(make_trace(rank, 3, each) for rank, each in enumerate(ops)))
    assert list(rows) == [("gather", 128 * KB)]
    assert rows["gather", 128 * KB].bytes == 3 * MB


def test_a_failed_operation_has_a_time_and_no_bytes() -> None:
    """5 s until an error, after an operation of 10 ms."""
    row = rows_of(make_trace(0, 1, [Op(0, 10), Op(10, 5010, error="timeout")]))["all_reduce", 128 * KB]
    assert row.errors == 1 and row.count == 2
    assert row.total_s == pytest.approx(5.01)
    assert row.mean_s == row.p99_s == pytest.approx(10 * MS)
    assert row.algbw == pytest.approx(MB / 0.01)


def test_values_that_a_backend_does_not_report_are_none() -> None:
    said = Op(0, 1, wire_bytes=600, retransmissions=3, registration=(3, 1))
    engine = rows_of(make_trace(0, 1, [said, said]))["all_reduce", 128 * KB]
    assert (engine.wire_bytes, engine.retransmissions) == (1200, 6)
    assert (engine.registration_hits, engine.registration_misses) == (6, 2)
    plain = rows_of(make_trace(0, 1, [Op(0, 1)]))["all_reduce", 128 * KB]
    assert plain.registration_hits is None and plain.wire_bytes == 0
    other = rows_of(make_trace(0, 1, [Op(0, 1)], source=PROFILER))["all_reduce", 128 * KB]
    assert (other.wire_bytes, other.retransmissions, other.registration_misses) == (None, None, None)
    assert other.algorithms == {"?": 1}


def test_rows_are_sorted_by_time_and_their_shares_add_up() -> None:
    findings = analyse(training())
    assert [(row.operation, row.above_bytes) for row in findings.rows] == [
        ("all_reduce", 0),
        ("all_reduce", 16 * MB),
        ("broadcast", 128 * KB),
    ]
    assert sum(row.share for row in findings.rows) == pytest.approx(1)
    exposed = [row.exposed_s for row in findings.rows if row.exposed_s is not None]
    assert sum(exposed) == pytest.approx(findings.overall.exposed_s)


def test_gaps_are_reported() -> None:
    whole = training(3, 2)
    absent = make_run(*whole.traces[:2])
    assert "1 of 3 ranks left no records, rank 2: means are over 2" in analyse(absent).coverage_gaps
    bare = make_trace(0, 1, [Op(0, 1)], coverage_gaps=["sends are not seen"], lost=7)
    said = analyse(make_run(bare)).coverage_gaps
    assert said[0] == "sends are not seen"
    assert any(text.startswith("7 operations were lost") for text in said)
    assert any("the training thread of rank 0 was not watched" in text for text in said)
    part = make_trace(0, 1, [Op(0, 10)], progress_ms=[(5, 0), (10, 5)])
    assert any("not watched during 50% of its communication" in text for text in analyse(make_run(part)).coverage_gaps)
    (within,) = analyse(training()).coverage_gaps
    assert within.startswith("in 120 of 120 operations the last ranks of two hosts began within the error")


def test_a_run_without_an_operation_has_no_rows() -> None:
    findings = analyse(make_run(make_trace(0, 1)))
    assert findings.rows == [] and findings.overall.communication_s == 0
