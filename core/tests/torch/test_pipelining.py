"""torch.distributed.pipelining over netfold, unchanged: losses and gradients against the same model on one process."""

from __future__ import annotations

from typing import Any

import pytest
from worlds import SIZE, Case, check

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("torch_pipelining")]  # the world is made once

MODES = ("auto",)
CASES: dict[str, Case] = {}
WIDTH = 24
MICROBATCHES = 8
ROWS = 32


def case(function: Any) -> Any:
    CASES[function.__name__] = lambda dist, rank, size, folder: function(dist, rank, size)
    return function


def layer(index: int) -> Any:
    """Weights are small fractions of two, so that f64 holds every product and sum exactly."""
    import torch

    generator = torch.Generator().manual_seed(index)
    linear = torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    for parameter in linear.parameters():
        parameter.data = torch.randint(-2, 3, parameter.shape, generator=generator).to(torch.float64) / 4
    return torch.nn.Sequential(linear, torch.nn.ReLU())


def batch() -> tuple[Any, Any]:
    import torch

    generator = torch.Generator().manual_seed(99)
    shape = (ROWS, WIDTH)
    return tuple(torch.randint(-2, 3, shape, generator=generator).to(torch.float64) for _ in range(2))


def loss_of(output: Any, target: Any) -> Any:
    return (output - target).square().sum()


def on_one_process(stages: int) -> tuple[float, list[list[Any]]]:
    """The loss, and each stage's gradients."""
    import torch

    layers = [layer(index) for index in range(stages)]
    inputs, targets = batch()
    loss = loss_of(torch.nn.Sequential(*layers)(inputs), targets)
    loss.backward()
    return loss.item(), [[parameter.grad for parameter in module.parameters()] for module in layers]


def check_schedule(dist: Any, rank: int, size: int, name: str, stages_a_rank: int, group: Any = None) -> None:
    import torch
    from torch.distributed import pipelining

    count = size * stages_a_rank
    mine = range(rank, count, size)
    layers = {index: layer(index) for index in mine}
    stages = [pipelining.PipelineStage(layers[index], index, count, torch.device("cpu"), group=group) for index in mine]
    schedule_class = getattr(pipelining, name)
    # Without scaling, gradients are the sum over microbatches: the whole batch's.
    schedule = schedule_class(
        stages[0] if stages_a_rank == 1 else stages, MICROBATCHES, loss_fn=loss_of, scale_grads=False
    )
    inputs, targets = batch()
    expected_loss, expected = on_one_process(count)
    for _ in range(2):
        for module in layers.values():
            module.zero_grad()
        losses: list[Any] = []
        args = (inputs,) if rank == 0 else ()
        kwargs = {"target": targets, "losses": losses} if rank == size - 1 else {}
        schedule.step(*args, **kwargs)
        if rank == size - 1:
            assert sum(loss.item() for loss in losses) == expected_loss
        for index, module in layers.items():
            for parameter, gradient in zip(module.parameters(), expected[index], strict=True):
                assert torch.equal(parameter.grad, gradient), (name, index)


@case
def one_forward_one_backward(dist: Any, rank: int, size: int) -> None:
    check_schedule(dist, rank, size, "Schedule1F1B", 1)


@case
def interleaved_stages(dist: Any, rank: int, size: int) -> None:
    check_schedule(dist, rank, size, "ScheduleInterleaved1F1B", 2)


@case
def fill_and_drain(dist: Any, rank: int, size: int) -> None:
    check_schedule(dist, rank, size, "ScheduleGPipe", 1)


@case
def a_pipeline_in_each_of_two_groups(dist: Any, rank: int, size: int) -> None:
    """Pipelines of two stages side by side, each in a sub-group."""
    groups = [dist.new_group([0, 1], backend="netfold"), dist.new_group([2, 3], backend="netfold")]
    check_schedule(dist, rank % 2, 2, "Schedule1F1B", 1, group=groups[rank // 2])


def test_the_world_size_equals_that_of_the_cases() -> None:
    assert SIZE == 4


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", MODES)
def test_each_case_passes_on_every_rank(mode: str, name: str) -> None:
    check(__name__, MODES, mode, name)
