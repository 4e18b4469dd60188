"""Batches and shares: which rank trains on which patches."""

import itertools

import pytest
import torch

from netfold_lab.demo.batches import batch, share
from netfold_lab.demo.settings import Job, Run, Training, permuted_orders, straight
from netfold_train.zoo.data.super_resolution import Pair

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_the_ranks_shares_cover_the_batch_once_under_any_permutation(order: tuple[int, ...]) -> None:
    training = Training(workers=4)
    taken = [index for rank in range(4) for index in share(training, order, rank)]
    assert sorted(taken) == list(range(training.patches))


@pytest.mark.parametrize("workers", [2, 3, 4, 5, 6, 9])
def test_permuted_orders_are_different_permutations_and_never_the_identity(workers: int) -> None:
    orders = permuted_orders(workers, 3)
    assert len(orders) == (1 if workers == 2 else 3)
    assert len({*orders, straight(workers)}) == len(orders) + 1
    assert all(sorted(order) == list(range(workers)) for order in orders)
    assert orders == permuted_orders(workers, 3)


def _numbered_pair() -> Pair:
    """Every pixel of the truth has a value of its own, and a low-resolution pixel is that of its upper left one."""
    truth = torch.arange(3 * 40 * 60, dtype=torch.float32).reshape(3, 40, 60)
    return Pair(low=truth[:, ::2, ::2], truth=truth)


def test_a_patch_depends_on_seed_step_and_index_but_not_on_the_rank() -> None:
    training = Training(workers=4, patch_pixels=8)
    pairs = [_numbered_pair()]
    whole_low, whole_truth = batch(training, pairs, 7, range(training.patches))
    for rank, order in itertools.product(range(4), [straight(4), (2, 0, 3, 1)]):
        indices = share(training, order, rank)
        low, truth = batch(training, pairs, 7, indices)
        assert torch.equal(low, whole_low[list(indices)])
        assert torch.equal(truth, whole_truth[list(indices)])
    assert not torch.equal(whole_low, batch(training, pairs, 8, range(training.patches))[0])
    assert len({tuple(patch.flatten().tolist()) for patch in whole_low}) == training.patches


def test_the_low_and_high_resolution_patches_show_the_same_place() -> None:
    training = Training(workers=4, patch_pixels=8)
    low, truth = batch(training, [_numbered_pair()], 3, range(training.patches))
    assert low.shape == (16, 3, 8, 8)
    assert truth.shape == (16, 3, 16, 16)
    # Mirrored patches have the low pixel at the upper right; each low pixel is one of the four it stands for.
    quads = truth.unfold(2, 2, 2).unfold(3, 2, 2).flatten(4)
    assert (quads == low[..., None]).any(dim=4).all()


def test_a_job_is_equal_after_json() -> None:
    job = Job(Training(workers=3), (Run("gloo, ranks 2 0 1", "gloo", (2, 0, 1), 30),), "/tmp/x")
    assert Job.from_json(job.to_json()) == job


def test_one_worker_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="workers: 1, expected 2 or more"):
        Training(workers=1)


def test_fewer_steps_than_the_warm_up_are_refused() -> None:
    with pytest.raises(ValueError, match="steps: 20, expected more than"):
        Training(steps=20)
