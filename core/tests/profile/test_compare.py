"""Comparisons of two runs, against the talk's numbers and against known noise."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from traces import KB, MB, Op, make_run, make_trace

from netfold.profile.compare import Comparison, compare
from netfold.profile.run import Run
from netfold.profile.table import render_comparison

# hvprof's table of EDSR's all_reduces, default beside optimised, in ms.
TALK = {100 * KB: (392, 391), 8 * MB: (320, 342), 24 * MB: (1321, 619), 64 * MB: (5145, 2587)}
COUNT = 40


def talk(side: int) -> Run:
    """COUNT operations of each size, whose times add up to the table's and vary by 3%."""
    ops = []
    at = 0.0
    for size, totals in TALK.items():
        vary = np.random.default_rng(size + side).normal(1, 0.03, COUNT)
        for took in totals[side] * vary / vary.sum():
            ops.append(Op(at, at + took, size))
            at += took
    return make_run(make_trace(0, 1, ops), command=["edsr", "default" if side == 0 else "optimised"])


def test_a_comparison_of_the_talks_times_shows_its_slower_size() -> None:
    """The talk prints "~ 0" for 320 -> 342 ms. It is a loss of 22 / 320 = 6.9%. Its totals, 7179 and 3918 ms and 45.4%,
    are not the sums of its rows: 392 + 320 + 1321 + 5145 = 7178, 391 + 342 + 619 + 2587 = 3939, and
    3239 / 7178 = 45.1%. Ours are sums."""
    found = compare(talk(0), talk(1))
    improvements = [round(row.improvement, 1) for row in found.rows if row.improvement is not None]
    assert improvements == [0.3, -6.9, 53.1, 49.7]
    assert [row.verdict for row in found.rows] == ["within noise", "SLOWER", "faster", "faster"]
    assert (found.total.a_s, found.total.b_s) == pytest.approx((7.178, 3.939))
    assert found.total.improvement == pytest.approx(45.12, abs=0.01)
    assert found.total.verdict == "faster"
    assert render_comparison(found).splitlines() == [
        "A: edsr default",
        "B: edsr optimised",
        " operation             size  A (ms)  B (ms)  improvement",
        "all_reduce     up to 128 KB     392     391        +0.3%  within noise",
        "all_reduce  128 KB to 16 MB     320     342        -6.9%        SLOWER",
        "all_reduce   16 MB to 32 MB    1321     619       +53.1%        faster",
        "all_reduce   32 MB to 64 MB    5145    2587       +49.7%        faster",
        "     total                     7178    3939       +45.1%        faster",
    ]


def run_of(times_ms: list[float], *, per_step: int = 0, ranks: int = 2, size: int = MB) -> Run:
    """Operations one after the other, on all ranks alike; a step has `per_step` of them, 0: no steps."""
    ends = np.cumsum([0.0, *times_ms])
    ops = [Op(float(begin), float(end), size) for begin, end in pairwise(ends)]
    steps = [(float(ends[at]), float(ends[at + per_step])) for at in range(0, len(ops), per_step)] if per_step else []
    return make_run(*(make_trace(rank, ranks, ops, steps_ms=steps) for rank in range(ranks)))


def noisy(mean_ms: float, count: int, seed: int) -> list[float]:
    return np.random.default_rng(seed).normal(mean_ms, 0.1 * mean_ms, count).tolist()


def test_equal_runs_differ_significantly_one_time_in_twenty() -> None:
    """60 pairs of the same distribution: more than 9 called different has a chance of 1 in 1000 (binomial, 5%)."""
    verdicts = [
        compare(run_of(noisy(10, 64, 2 * seed)), run_of(noisy(10, 64, 2 * seed + 1))).total.verdict
        for seed in range(60)
    ]
    assert verdicts.count("within noise") >= 51


def test_a_change_beyond_the_spread_is_seen() -> None:
    """10 ms +- 1, 64 of each: the mean is known to 0.125 ms, the difference to 0.18; 10% are 5.6 times that."""
    for seed in range(10):
        assert compare(run_of(noisy(10, 64, seed)), run_of(noisy(11, 64, seed + 50))).rows[0].verdict == "SLOWER"
        assert compare(run_of(noisy(11, 64, seed)), run_of(noisy(10, 64, seed + 50))).total.verdict == "faster"


def test_a_slow_drift_is_no_change() -> None:
    """Times wander up and down by 30% once in a run of 640: a sample of single operations would be sure of a difference
    between a run that begins high and one that begins low, of which there is none in the whole period, and close to
    none of 2% in these."""
    wave = 10 * (1 + 0.3 * np.sin(np.linspace(0, 2 * np.pi, 640)))
    found = compare(run_of((wave * 1.02).tolist()), run_of(wave[::-1].tolist()))
    assert found.rows[0].improvement == pytest.approx(100 * 0.02 / 1.02)
    assert found.rows[0].verdict == "within noise"


def test_runs_of_different_lengths_are_compared_by_the_step() -> None:
    """A: 20 steps of two operations of 10 ms. B: 40 steps of two of 8 ms: 60% more in all, a fifth less in a step."""
    found = compare(run_of([10.0] * 40, per_step=2), run_of([8.0] * 80, per_step=2))
    (row,) = found.rows
    assert row.steps == (20, 40)
    assert row.improvement == pytest.approx(-60)
    assert row.per_step_s == pytest.approx((0.02, 0.016))
    assert row.improvement_per_step == pytest.approx(20)
    assert row.verdict == "faster" and row.within_noise is False
    assert found.notes == ["A has 20 steps, B 40: verdicts are on the time of a step, not on the totals"]
    assert "a step: A (ms)" in render_comparison(found)
    same = compare(run_of([10.0] * 40, per_step=2), run_of([8.0] * 40, per_step=2))
    assert not same.notes and "a step" not in render_comparison(same)


def test_too_few_operations_have_no_verdict_on_noise() -> None:
    found = compare(run_of([10, 10, 10]), run_of([12, 12, 12]))
    assert found.rows[0].within_noise is None
    assert found.rows[0].verdict == "SLOWER"
    assert "too few to tell noise" in render_comparison(found)


def test_without_steps_other_counts_have_no_verdict_on_noise() -> None:
    found = compare(run_of(noisy(10, 40, 1)), run_of(noisy(10, 60, 2)))
    assert found.rows[0].within_noise is None and found.rows[0].counts == (40, 60)


def test_operations_of_one_run_only_are_marked() -> None:
    found = compare(run_of([10.0] * 8), run_of([5.0] * 8, size=32 * MB))
    assert [(row.above_bytes, row.verdict, row.improvement) for row in found.rows] == [
        (128 * KB, "only in A", 100.0),
        (16 * MB, "only in B", None),
    ]
    assert found.total.improvement == pytest.approx(50)
    assert "only in B" in render_comparison(found)


def test_a_comparison_is_deterministic() -> None:
    def again() -> Comparison:
        return compare(run_of(noisy(10, 64, 3)), run_of(noisy(10.4, 64, 4)))

    assert again() == again()


def test_differences_between_the_runs_are_noted() -> None:
    found = compare(run_of([1.0] * 8, per_step=1), run_of([1.0] * 8, ranks=3))
    assert found.notes == [
        "only A has steps: the totals are compared, whatever work they contain",
        "A is of 2 ranks, B of 3",
    ]


def test_operations_of_a_few_steps_have_no_verdict_on_noise() -> None:
    """20 steps, and an operation of another size in the first alone: 300 ms in A, 30 in B."""

    def run(took: float) -> Run:
        ops = [Op(0, took, 32 * MB), *(Op(1000 + 20 * at, 1010 + 20 * at) for at in range(20))]
        steps = [(0.0, 1015.0), *((1015.0 + 20 * at, 1035.0 + 20 * at) for at in range(19))]
        return make_run(make_trace(0, 1, ops, steps_ms=steps))

    rows = {row.above_bytes: row for row in compare(run(300), run(30)).rows}
    assert rows[16 * MB].within_noise is None and rows[16 * MB].verdict == "faster"
    assert rows[128 * KB].within_noise, "the same in both"
