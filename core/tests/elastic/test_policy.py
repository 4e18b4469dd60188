"""Parts of a step's samples: no sample is lost or taken twice beyond what the policy says."""

from __future__ import annotations

import pytest

from netfold.elastic.policy import Parts, Policy, divide, keep


@pytest.mark.parametrize("size", range(1, 18))
@pytest.mark.parametrize("samples", [1, 2, 7, 16, 64, 65, 1000])
def test_every_sample_has_one_rank(samples: int, size: int) -> None:
    parts = divide(samples, size)
    assert [number for each in parts.ranges for number in each] == list(range(samples))
    lengths = [len(each) for each in parts.ranges]
    assert max(lengths) - min(lengths) <= 1
    assert parts.trained == samples
    # The mean over ranks of weighted means is the mean over samples.
    values = [float(3 * number * number + 1) for number in range(samples)]
    means = [sum(values[n] for n in each) / len(each) if each else 0.0 for each in parts.ranges]
    mean = sum(parts.weight(rank) * mean for rank, mean in enumerate(means)) / size
    assert mean == pytest.approx(sum(values) / samples, rel=1e-12)


def test_ranks_that_are_left_keep_their_parts() -> None:
    before = divide(32, 8)
    left = keep(before, [0, 1, 3, 4, 6, 7])
    assert left.ranges == tuple(before.ranges[rank] for rank in (0, 1, 3, 4, 6, 7))
    assert left.trained == 24 and left.weight(2) == 1.0


def test_a_second_loss_in_one_step_drops_only_its_own_part() -> None:
    before = divide(10, 4)  # 3, 3, 2, 2
    once = keep(before, [0, 2, 3])
    twice = keep(once, [0, 2])
    assert twice.ranges == (range(3), range(8, 10))
    assert twice.weight(0) * 0.5 * 5 == pytest.approx(3)


def test_a_newcomer_takes_a_lost_part() -> None:
    before = divide(8, 4)
    assert keep(before, [0, 2, 3, -1]).ranges == (range(2), range(4, 6), range(6, 8), range(2, 4))
    # More newcomers than losses: one has nothing to do in this step.
    more = keep(before, [0, 1, 2, 3, -1])
    assert more.ranges[4] == range(0) and more.weight(4) == 0.0 and more.trained == 8


def test_a_batch_and_rate_of_the_number_of_ranks() -> None:
    whole = Policy(64)
    assert (whole.step_samples(5, 8), whole.factor(5, 8)) == (64, 1.0)
    linear = Policy(64, batch="per_rank", learning_rate="linear")
    assert (linear.step_samples(6, 8), linear.factor(6, 8)) == (48, 0.75)
    root = Policy(64, batch="per_rank", learning_rate="sqrt")
    assert (root.step_samples(2, 8), root.factor(2, 8)) == (16, 0.5)
    assert Policy(64, batch="per_rank").factor(2, 8) == 1.0


def test_the_policy_is_written() -> None:
    assert Policy(64).describe(7, 8) == (
        "a step takes 64 samples (batch = 'global'), 9 or 10 a rank; the learning rate is unchanged"
    )
    assert Policy(64, batch="per_rank", learning_rate="linear").describe(6, 8) == (
        "a step takes 48 samples (batch = 'per_rank'), 8 a rank; the learning rate is multiplied by 0.75 "
        "(learning_rate = 'linear')"
    )


def test_words_and_numbers_that_no_policy_has_are_refused() -> None:
    with pytest.raises(ValueError, match="batch='half' is not one of global, per_rank"):
        Policy(8, batch="half")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one sample"):
        Policy(0)
    with pytest.raises(ValueError, match="10 samples do not divide among the 4 ranks"):
        Policy(10, batch="per_rank").step_samples(3, 4)


def test_nobody_is_left_with_nothing() -> None:
    assert Parts((range(3),)).weight(0) == 1.0
