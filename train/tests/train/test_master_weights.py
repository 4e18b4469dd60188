"""f32 weights and gradients beside lower copies, and the loss scale: they keep changes that rounding would lose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from netfold_train.optim.step import OptimizerStep
from netfold_train.parallel.precision import Precision

LR = 2.0**-12
# Of torch.amp.GradScaler.
INITIAL = 2.0**16
GROWS_AFTER_STEPS = 2000


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_steps_below_the_resolution_of_bf16_add_up() -> None:
    module = nn.Linear(1, 1, bias=False)
    nn.init.ones_(module.weight)
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    for _ in range(64):
        optimizer.zero_grad()
        output = computed("bf16", module, torch.ones(1, 1))
        assert output.dtype == torch.bfloat16
        output.sum().backward()
        optimizer.step()
    # Below 1, bf16's numbers are 2**-8 apart: no step would change a bf16 weight.
    assert module.weight.item() == 1.0 - 64 * LR
    assert module.weight.dtype == torch.float32


def computed(precision: Any, module: nn.Module, inputs: Tensor) -> Tensor:
    with Precision(precision).context(module, torch.device("cpu")):
        output: Tensor = module(inputs)
    return output


def test_gradients_of_parts_of_a_batch_are_added_in_f32() -> None:
    for precision in ("bf16", "f16"):
        module = nn.Linear(1, 1, bias=False)
        # The first part's gradient is 256, each of the others' is 1/2: bf16 would lose all of these, f16 some.
        for value in (256.0, *[0.0625] * 64):
            computed(precision, module, torch.full((1, 1), value)).sum().backward()
        assert module.weight.grad is not None and module.weight.grad.dtype == torch.float32
        assert module.weight.grad.item() == 256.0 + 64 * 0.0625


def test_gradients_of_ranks_are_averaged_in_f32() -> None:
    from ranks import run_ranks, values

    for found in values(run_ranks(_averaged, 2)):
        assert found == {"bf16 zero 0": 128.125, "bf16 zero 3": 128.125, "f16 zero 0": 128.125, "f16 zero 3": 128.125}


def _averaged(rank: int, size: int, folder: str) -> dict[str, float]:
    """The mean gradient of a weight that is 256 on one rank and 1/4 on the other."""
    from surviving import toy_recipe
    from torch.distributed.tensor import DTensor

    from netfold_train.parallel.data_parallel import wrap_data_parallel
    from netfold_train.parallel.mesh import Mesh

    dist.init_process_group("netfold", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    found = {}
    for zero in (0, 3):
        for precision in ("bf16", "f16"):
            module = nn.Linear(1, 2, bias=False)
            recipe = toy_recipe(training={"precision": precision}, parallel={"zero": zero})
            shared = wrap_data_parallel(module, [], recipe, Mesh(recipe.parallel))
            inputs = torch.full((1, 1), 0.25 if rank else 256.0)
            with Precision(precision).context(module, torch.device("cpu")):
                shared(inputs).sum().backward()
            gradient = module.weight.grad
            assert gradient is not None and gradient.dtype == torch.float32
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            found[f"{precision} zero {zero}"] = float(whole[0])
    dist.destroy_process_group()
    return found


def test_statistics_stay_f32() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    computed("bf16", module, torch.randn(4, 3)).float().sum().backward()
    norm = module[1]
    assert {tensor.dtype for tensor in (norm.weight, norm.running_mean, norm.weight.grad)} == {torch.float32}


def test_gradients_are_divided_by_the_loss_scale_in_f32() -> None:
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    # f16's smallest number: divided in f16 it would be 0.
    computed("f16", module, torch.full((1, 1), 2.0**-24)).sum().backward()
    assert module.weight.grad is not None
    module.weight.grad.mul_(2.0**-16)
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    assert module.weight.item() == -(2.0**-40)


def scaled(*gradients: Tensor) -> tuple[OptimizerStep, list[bool]]:
    """Step once on each gradient of an f16 run; return whether each step was skipped."""
    from surviving import toy_recipe

    from netfold_train.parallel.mesh import Mesh

    class Held:
        def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
            return iter([("weight", weight)])

    weight = nn.Parameter(torch.zeros(3))
    recipe = toy_recipe(training={"precision": "f16"})
    step = OptimizerStep(Held(), torch.optim.SGD([weight], lr=1.0), recipe, Mesh(recipe.parallel))  # type: ignore[arg-type]
    skipped = []
    for gradient in gradients:
        weight.grad = gradient.clone()
        step.step(1.0)
        skipped.append(step.skipped)
    return step, skipped


def test_the_loss_scale_falls_at_once_and_rises_after_many_good_steps(alone: None) -> None:
    good, bad = torch.ones(3), torch.tensor([1.0, float("inf"), 1.0])
    step, skipped = scaled(good, bad, torch.full((3,), float("nan")))
    assert skipped == [False, True, True]
    assert step.loss_scale == INITIAL / 4
    step.load_state_dict({**step.state_dict(), "_growth_tracker": GROWS_AFTER_STEPS - 1})
    (parameter,) = step.optimizer.param_groups[0]["params"]
    parameter.grad = good
    step.step(1.0)
    assert step.loss_scale == INITIAL / 2
    again, _ = scaled()
    again.load_state_dict(step.state_dict())
    assert again.state_dict() == step.state_dict()
    assert again.loss_scale == INITIAL / 2


def test_gradients_that_overflow_without_a_scale_end_training_with_advice(alone: None) -> None:
    step, _ = scaled()
    step.load_state_dict({**step.state_dict(), "scale": 1.0})
    (parameter,) = step.optimizer.param_groups[0]["params"]
    parameter.grad = torch.full((3,), float("inf"))
    with pytest.raises(ArithmeticError, match=r'loss scale of 1.*try training.precision = "bf16"'):
        step.step(1.0)
