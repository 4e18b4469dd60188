"""The comparison of losses: rounding passes, and larger differences fail."""

import numpy as np
import pytest

from netfold_lab.demo.agreement import SMALLEST_DIFFERENCE, compare

STEPS = 30


def _rounding_noise(seed: int) -> np.ndarray:
    """Differences as training makes them: from the last bit to a thousand times that."""
    growth = np.geomspace(4 * SMALLEST_DIFFERENCE, 4e3 * SMALLEST_DIFFERENCE, STEPS)
    return growth * np.random.default_rng(seed).uniform(0.3, 1.0, STEPS)


GLOO = np.linspace(0.03, 0.02, STEPS)
PERMUTED = [list(GLOO + _rounding_noise(seed)) for seed in (1, 2, 3)]


def test_another_sample_of_the_same_noise_passes() -> None:
    assert compare(list(GLOO + _rounding_noise(4)), list(GLOO), PERMUTED).within_rounding


def test_losses_that_differ_a_hundredfold_at_the_start_fail_even_if_they_converge() -> None:
    wrong = GLOO + _rounding_noise(4)
    wrong[3] += 1000 * SMALLEST_DIFFERENCE
    wrong[4:12] += 400 * SMALLEST_DIFFERENCE
    agreement = compare(list(wrong), list(GLOO), PERMUTED)
    assert agreement.ratio > 4
    assert not agreement.within_rounding


def test_equal_losses_have_the_smallest_ratio_and_pass() -> None:
    agreement = compare(list(GLOO), list(GLOO), PERMUTED)
    assert agreement.ratio < 0.1
    assert not agreement.difference.any()


def test_without_noise_in_gloo_equal_losses_pass_and_others_fail() -> None:
    assert compare(list(GLOO), list(GLOO), [list(GLOO)]).ratio == 1
    assert not compare(list(GLOO + 1e-6), list(GLOO), [list(GLOO)]).within_rounding


def test_only_the_steps_that_all_runs_have_are_compared() -> None:
    longer = np.concatenate([GLOO, [0.5]])
    agreement = compare(list(longer + 0), [*GLOO, 0.1], PERMUTED)
    assert agreement.steps == STEPS
    assert agreement.gloo_differences.shape == (3, STEPS)


def test_losses_that_are_not_numbers_fail() -> None:
    broken = GLOO.copy()
    broken[5:] = np.nan
    assert not compare(list(broken), list(GLOO), PERMUTED).within_rounding


@pytest.mark.parametrize("step", [0, 29])
def test_differences_are_given_for_each_step(step: int) -> None:
    shifted = GLOO.copy()
    shifted[step] += 0.5
    assert compare(list(shifted), list(GLOO), PERMUTED).difference[step] == pytest.approx(0.5)
