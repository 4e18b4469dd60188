"""Threads that make a rank's batches (`run.loaders`), and batches in pinned memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from load import seconds
from training import TINY_GPT, changed, trained

pytestmark = pytest.mark.torch


def made(index: int, seed: int) -> tuple[Any, Any]:
    import torch

    return torch.tensor([index, seed % 1000]), torch.tensor(float(index))


@pytest.mark.parametrize("count", [1, 2, 7, 8])
def test_a_batch_of_several_threads_is_that_of_one(count: int) -> None:
    import torch

    from netfold_train.data.examples import OneByOne, Pooled

    plain = OneByOne(100, made)
    numbers, seeds = list(range(90, 90 + count)), list(range(5, 5 + count))
    found, wanted = (each.batch(numbers, seeds) for each in (Pooled(plain, 3), plain))
    assert len(Pooled(plain, 3)) == 100
    for one, other in zip(found.tensors, wanted.tensors, strict=True):
        assert torch.equal(one, other)


def test_threads_work_at_the_same_time() -> None:
    from netfold_train.data.examples import OneByOne, Pooled

    both = threading.Barrier(2)

    def waits(index: int, seed: int) -> tuple[Any, Any]:
        # Raises BrokenBarrierError unless another example is being made meanwhile.
        both.wait(timeout=seconds(30))
        return made(index, seed)

    assert len(Pooled(OneByOne(100, waits), 2).batch([3, 4], [0, 0])) == 2


def test_an_example_that_cannot_be_read_is_replaced_alone() -> None:
    from netfold_train import BadExampleError
    from netfold_train.data.examples import OneByOne, Pooled
    from netfold_train.fault_tolerance.bad_examples import BadExampleReplacer

    def fails(index: int, seed: int) -> tuple[Any, Any]:
        if index == 2:
            raise BadExampleError("example 2: damaged")
        return made(index, seed)

    def targets(loaders: int) -> Sequence[float]:
        examples = BadExampleReplacer(Pooled(OneByOne(100, fails), loaders))
        numbers: list[float] = examples.batch([0, 1, 2, 3], [7, 8, 9, 10]).target.tolist()
        assert examples.new_messages() == ["example 2: damaged"]
        return numbers

    assert targets(2) == targets(1)
    assert targets(2)[:2] == [0.0, 1.0] and targets(2)[2] != 2.0


def test_batches_for_a_gpu_are_pinned_on_the_threads_that_make_them(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from netfold_train.data.examples import OneByOne
    from netfold_train.data.sampler import Prefetcher

    pinned_on: list[str] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned_on.append(threading.current_thread().name)
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    batches = Prefetcher(OneByOne(100, made), 0, 4, 0, 1, pin=True)
    batches.get(0)
    batches.close()
    # The input and the target of one batch or, with the next one, two.
    assert len(pinned_on) in (2, 4) and all(name.startswith("netfold-feed") for name in pinned_on)


def test_a_recipe_trains_the_same_with_any_number_of_threads() -> None:
    recipes = [changed(TINY_GPT, run={"loaders": loaders}) for loaders in (1, 3)]
    one, other = (outcomes[0].losses for outcomes in trained(recipes, 2))
    assert one == other and len(set(one)) == 4
