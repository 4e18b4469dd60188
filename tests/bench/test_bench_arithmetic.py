"""Sizes, patterns, spreads, rows and tables, without a worker."""

import json

import numpy as np
import pytest

from netfold.bench.config import Config, Measured, Result, SizeResult, calls_a_round, labels
from netfold.bench.pattern import contribution, expected_sum, modulus
from netfold.bench.report import describe_run, make_rows, total_wrong
from netfold.bench.sizes import DTYPES, format_size, parse_size, sweep
from netfold.bench.spread import paired_ratios, spread
from netfold.bench.suite import Outcome, make_cases, render_markdown
from netfold.bench.table import render_table


@pytest.mark.parametrize(("text", "size_bytes"), [("4", 4), ("64K", 65536), ("16M", 1 << 24), ("1G", 1 << 30)])
def test_suffixes_are_powers_of_two_and_sizes_print_as_they_are_read(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes
    assert format_size(size_bytes) == text


@pytest.mark.parametrize("text", ["", "M", "4m", "1.5M", "-4", "4MB"])
def test_a_size_that_is_not_understood_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="64K"):
        parse_size(text)


def test_a_sweep_multiplies_up_to_the_end_and_not_beyond() -> None:
    assert sweep(4, 64, 4) == [4, 16, 64]
    assert sweep(4, 63, 4) == [4, 16]
    assert sweep(8, 8, 2) == [8]


@pytest.mark.parametrize(("begin", "end", "factor"), [(0, 8, 2), (8, 4, 2), (4, 8, 1)])
def test_a_sweep_that_would_not_end_or_not_begin_is_refused(begin: int, end: int, factor: int) -> None:
    with pytest.raises(ValueError):
        sweep(begin, end, factor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("workers", [1, 2, 8, 36])
def test_the_largest_sum_is_exact_in_its_dtype(dtype: str, workers: int) -> None:
    p = modulus(DTYPES[dtype].exact_below, workers)
    assert workers * (p - 1) < DTYPES[dtype].exact_below
    for round_index in (0, 1, 1000):
        assert expected_sum(workers, round_index, p).max() <= workers * (p - 1)


def test_a_dtype_too_narrow_to_check_is_refused() -> None:
    with pytest.raises(ValueError, match="wider"):
        modulus(DTYPES["bf16"].exact_below, 64)


@pytest.mark.parametrize("p", [7, 31, 65521])
def test_within_a_period_every_element_differs_and_so_do_ranks_and_rounds(p: int) -> None:
    assert len(set(contribution(3, 5, p).tolist())) == p
    assert not np.any(contribution(3, 5, p) == contribution(4, 5, p))
    assert not np.any(contribution(3, 5, p) == contribution(3, 6, p))


@pytest.mark.parametrize("shift", [1, 32, 352, 1024, 4096, 65536])
def test_a_message_shifted_by_a_packet_or_a_page_is_wrong_everywhere(shift: int) -> None:
    p = modulus(DTYPES["f32"].exact_below, 4)
    row = contribution(0, 0, p)
    assert not np.any(row == np.roll(row, shift))


def test_percentiles_are_those_of_numpy() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 8.0, 9.0, 1.5]
    of = spread(values)
    assert [of.p5, of.p25, of.median, of.p75, of.p95] == pytest.approx(np.percentile(values, [5, 25, 50, 75, 95]))
    assert of.n == 7


def test_a_spread_of_one_value_is_that_value() -> None:
    assert (spread([3.0]).p5, spread([3.0]).median, spread([3.0]).p95) == (3.0, 3.0, 3.0)


def test_ratios_are_paired_by_round_so_that_what_slows_a_round_cancels() -> None:
    ours, peer = [100, 200, 100], [150, 300, 150]
    of = spread(paired_ratios(peer, ours))
    assert (of.p5, of.median, of.p95) == (1.5, 1.5, 1.5)


def test_a_backend_named_twice_has_two_labels() -> None:
    assert labels(["gloo", "netfold", "gloo"]) == ["gloo", "netfold", "gloo#2"]


def test_only_small_sizes_are_called_several_times_a_round() -> None:
    assert calls_a_round(4) > 1
    assert calls_a_round(1 << 20) == 1


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"backends": []}, "no backend"),
        ({"workers": 0}, "workers"),
        ({"rounds": 0}, "rounds"),
        ({"sizes": [2]}, "no element of f32"),
        ({"dtype": "f8"}, "f32, f64"),
    ],
)
def test_a_run_that_would_measure_nothing_is_refused(changed: dict[str, object], complaint: str) -> None:
    asked: dict[str, object] = {"backends": ["gloo"], "workers": 2, "sizes": [4], **changed}
    with pytest.raises(ValueError, match=complaint):
        Config(**asked)  # type: ignore[arg-type]


CONFIG = Config(["netfold", "gloo"], workers=4, sizes=[1 << 20], rounds=3, breakdown=True, rack_rate="1gbit")
RESULT = Result(
    "2.13.0",
    "bbr",
    [
        SizeResult(
            1 << 20,
            1 << 18,
            [
                Measured(
                    [10**6, 2 * 10**6, 10**6], 0, [[600, 400], [500, 500]], [9000, 9200], [[30, 1, 60], [40, 1, 70]]
                ),
                Measured([2 * 10**6, 3 * 10**6, 2 * 10**6], 5, [[900, 900], [900, 900]], [8000, 8200], None),
            ],
        )
    ],
)


def test_rows_hold_the_columns_of_nccl_tests() -> None:
    ours, peer = make_rows(CONFIG, RESULT)
    assert (ours.backend, ours.size_bytes, ours.count, ours.dtype, ours.redop) == (
        "netfold",
        1 << 20,
        1 << 18,
        "f32",
        "sum",
    )
    # 2^20 bytes in a millisecond; busbw is 2 (4 - 1) / 4 of it.
    assert ours.algbw == pytest.approx((1 << 20) * 1000)
    assert ours.busbw == pytest.approx(ours.algbw * 1.5)
    assert ours.wire_bytes == 1000
    assert (ours.wrong, peer.wrong, total_wrong([ours, peer])) == (0, 5, 5)


def test_each_row_has_its_ratio_to_the_first_other_backend() -> None:
    ours, peer = make_rows(CONFIG, RESULT)
    assert ours.ratio is not None and peer.ratio is not None
    assert (ours.ratio.peer, ours.ratio.rounds, ours.ratio.spread.median) == ("gloo", [2, 1.5, 2], 2)
    assert (peer.ratio.peer, peer.ratio.spread.median) == ("netfold", 0.5)


def test_a_breakdown_has_parts_only_where_there_are_event_records() -> None:
    ours, peer = make_rows(CONFIG, RESULT)
    assert ours.breakdown is not None and peer.breakdown is not None
    assert (ours.breakdown.python_ns, ours.breakdown.queue_ns, ours.breakdown.wire_ns) == (35, 1, 65)
    assert (peer.breakdown.call_ns, peer.breakdown.python_ns) == (8100, None)


def test_a_lone_backend_has_no_ratio_and_its_table_still_stands() -> None:
    config = Config(["gloo"], workers=4, sizes=[1 << 20], rounds=3)
    result = Result("2.13.0", "bbr", [SizeResult(1 << 20, 1 << 18, [Measured([10**6], 0, None, None, None)])])
    (row,) = make_rows(config, result)
    assert row.ratio is None
    assert render_table([row]).splitlines()[1].split()[-4:] == ["-", "-", "-", "-"]


def test_a_table_has_a_line_a_row_under_its_header() -> None:
    lines = render_table(make_rows(CONFIG, RESULT)).splitlines()
    assert lines[0].split()[:6] == ["size(B)", "count", "type", "redop", "backend", "time(us)"]
    assert len({len(line) for line in lines[:3]}) == 1
    assert "Python" in lines[3]


def test_a_run_survives_json_both_ways() -> None:
    assert Result.from_json(json.loads(json.dumps(RESULT.to_json()))) == RESULT
    text = json.dumps(describe_run(CONFIG, RESULT, make_rows(CONFIG, RESULT)))
    machine = json.loads(text)["machine"]
    assert machine["tcp_congestion_control"] == "bbr"
    assert {"cpu", "cores", "kernel"} <= machine.keys()
    assert json.loads(text)["rows"][0]["times_ns"] == [10**6, 2 * 10**6, 10**6]


def test_the_suite_says_why_a_case_was_not_measured() -> None:
    first, *others = make_cases(["netfold", "gloo"])
    markdown = render_markdown([Outcome(first, reason="a rack needs root\nand more"), Outcome(others[0], reason="-")])
    line = next(line for line in markdown.splitlines() if "needs root" in line)
    assert line.endswith("|") and ">= 1.35" in line
    assert len({line.count("|") for line in markdown.splitlines()}) == 1


def test_the_suite_asks_for_what_netfold_claims() -> None:
    asked = {
        (case.config.rack_rate, case.config.workers, case.config.sizes[0]): case.target for case in make_cases(["a"])
    }
    assert asked[("1gbit", 4, 16 << 20)] == asked[("1gbit", 8, 16 << 20)] == 1.35
    assert (None, 4, 64 << 20) in asked and (None, 2, 4) in asked and (None, 4, 4) in asked
