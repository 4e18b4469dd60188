"""Failures and checkpoints: Daly's expectation against a simulated run, and the best interval between checkpoints."""

import math
import random

import pytest

from netfold_plan.failures import Failures, best_interval_s, expected_goodput

DAY = 86400.0
CASES = [
    Failures(between_s=5 * 365 * DAY, ranks=1024, checkpoint_s=30, restart_s=300),
    Failures(between_s=365 * DAY, ranks=10_240, checkpoint_s=60, restart_s=600),
    Failures(between_s=100 * DAY, ranks=16_384, checkpoint_s=120, restart_s=240),
    Failures(between_s=DAY, ranks=64, checkpoint_s=600, restart_s=1200),
]


def simulated_goodput(failures: Failures, interval_s: float, segments: int) -> float:
    """The goodput of one run until so many segments are done, failure by failure."""
    chance, rate = random.Random(0), 1 / failures.job_between_s
    now_s, done, next_failure_s = 0.0, 0, chance.expovariate(rate)
    while done < segments:
        ends_s = now_s + interval_s + failures.checkpoint_s
        if next_failure_s >= ends_s:
            now_s, done = ends_s, done + 1
            continue
        # A restart may fail too.
        while True:
            now_s = next_failure_s
            next_failure_s = now_s + chance.expovariate(rate)
            if next_failure_s >= now_s + failures.restart_s:
                now_s += failures.restart_s
                break
    return segments * interval_s / now_s


@pytest.mark.parametrize("failures", CASES)
@pytest.mark.parametrize("times", [0.3, 1.0, 3.0])
def test_a_simulated_run_makes_the_expected_progress(failures, times):
    interval_s = times * best_interval_s(failures)
    simulated = simulated_goodput(failures, interval_s, segments=20_000)
    assert simulated == pytest.approx(expected_goodput(failures, interval_s), rel=0.02)


@pytest.mark.parametrize("failures", CASES)
def test_no_other_checkpoint_interval_is_better_than_the_best(failures):
    best = best_interval_s(failures)
    most = expected_goodput(failures, best)
    assert all(expected_goodput(failures, factor * best) < most for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0))
    between_s, checkpoint_s = failures.job_between_s, failures.checkpoint_s
    assert (1 - best / between_s) * math.exp((best + checkpoint_s) / between_s) == pytest.approx(1)


def test_short_checkpoints_have_youngs_interval():
    rare = Failures(between_s=1000 * DAY, ranks=1, checkpoint_s=1, restart_s=0)
    assert best_interval_s(rare) == pytest.approx(math.sqrt(2 * rare.checkpoint_s * rare.job_between_s), rel=1e-3)
    # Daly's higher order: sqrt(2 c M) (1 + sqrt(c / 2M) / 3 + c / 18M) - c.
    often = Failures(between_s=DAY, ranks=1, checkpoint_s=600, restart_s=0)
    half = math.sqrt(600 / (2 * DAY))
    assert best_interval_s(often) == pytest.approx(
        math.sqrt(2 * 600 * DAY) * (1 + half / 3 + half**2 / 9) - 600, rel=1e-3
    )


@pytest.mark.parametrize("ratio", [1e-9, 1e-3, 0.1, 1.0, 10.0, 30.0])
def test_the_best_interval_is_found_for_any_checkpoint(ratio):
    failures = Failures(between_s=1000.0, ranks=1, checkpoint_s=1000.0 * ratio, restart_s=0)
    best = best_interval_s(failures)
    assert 0 < best <= 1000
    at = best / 1000
    assert math.log1p(-at) + at + ratio == pytest.approx(0, abs=1e-6 * max(1, ratio)) or 1 - at < 1e-12


def test_goodput_falls_with_more_ranks():
    left = []
    for ranks in (64, 1024, 16_384):
        failures = Failures(between_s=5 * 365 * DAY, ranks=ranks, checkpoint_s=60, restart_s=600)
        left.append(expected_goodput(failures, best_interval_s(failures)))
    assert 1 > left[0] > left[1] > left[2] > 0.5


def test_impossible_intervals_and_checkpoints_are_refused():
    assert expected_goodput(Failures(between_s=1, ranks=1, checkpoint_s=600, restart_s=600), 3600) == 0
    with pytest.raises(ValueError, match="a checkpoint every 0 s leaves no time to train"):
        expected_goodput(CASES[0], 0)
    with pytest.raises(ValueError, match="a checkpoint takes time"):
        Failures(between_s=1, ranks=1, checkpoint_s=0, restart_s=0)
