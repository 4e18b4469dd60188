"""f32 weights beside lower ones, and the loss scale: what rounding would lose is kept."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from netfold.train.optimizers.loss_scale import GROWS_AFTER_STEPS, INITIAL, LossScale
from netfold.train.optimizers.master import MasterWeights
from netfold.train.precision import Precision

LR = 2.0**-12


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_steps_smaller_than_what_bf16_can_tell_add_up() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = MasterWeights([weight], torch.optim.SGD, lr=LR)
    for _ in range(64):
        stepped(optimizer, weight, 1.0)
    # Near 1, bf16's numbers are 2**-8 apart downwards: none of the steps would have moved it.
    assert weight.tolist() == [1.0 - 64 * LR] * 3
    assert weight.dtype == torch.bfloat16 and optimizer.state[weight]["master"].dtype == torch.float32


def test_it_steps_as_the_other_optimizer_does_on_f32_weights() -> None:
    start = torch.randn(5, generator=torch.Generator().manual_seed(1)).bfloat16()
    low, full, both = nn.Parameter(start.clone()), nn.Parameter(start.float()), nn.Parameter(start.float())
    adam = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    plain = adam([{"params": [full]}, {"params": [], "lr": 0.5}])
    masters = MasterWeights([low, both], torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    for gradient in (0.5, -2.0, 0.25):
        for optimizer in (plain, masters):
            optimizer.param_groups[0]["lr"] = 0.02 * abs(gradient)
        stepped(plain, full, gradient)
        both.grad = torch.full_like(both, gradient)
        stepped(masters, low, gradient)
    assert torch.equal(masters.state[low]["master"], full)
    assert torch.equal(both, full), "an f32 parameter needs no other"
    assert torch.equal(low, full.bfloat16())
    for key in ("exp_avg", "exp_avg_sq", "step"):
        assert torch.equal(masters.state[low][key], plain.state[full][key])


def test_a_loaded_state_goes_on_in_f32() -> None:
    def trained(weight: Tensor, optimizer: MasterWeights, *gradients: float) -> Tensor:
        for gradient in gradients:
            stepped(optimizer, weight, gradient)
        return weight.detach().clone()

    adam = partial(MasterWeights, inner=torch.optim.Adam, lr=0.01)
    first, second = (nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2))
    saving, loading = adam([first]), adam([second])
    second.data = trained(first, saving, 1.0, 0.3)
    loading.load_state_dict(saving.state_dict())
    assert torch.equal(trained(second, loading, 0.2), trained(first, saving, 0.2))
    assert torch.equal(loading.state[second]["master"], saving.state[first]["master"])


def test_gradients_are_divided_by_the_loss_scale_in_f32() -> None:
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float16))
    optimizer = MasterWeights([weight], torch.optim.SGD, lr=1.0)
    optimizer.gradient_factor = 2.0**-16
    # f16's smallest number: divided in f16 it would be 0.
    stepped(optimizer, weight, 2.0**-24)
    assert optimizer.state[weight]["master"].item() == -(2.0**-40)


def test_masters_start_from_weights_that_are_not_rounded() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    module[2].weight = module[0].weight
    linear, norm = module[0].weight.detach().clone(), module[1].weight
    Precision("bf16").lower(module)
    optimizer = MasterWeights(module.parameters(), torch.optim.SGD, lr=0.1)
    assert torch.equal(optimizer.state[module[0].weight]["master"], linear)
    assert module[0].weight.dtype == torch.bfloat16 and not torch.equal(module[0].weight.float(), linear)
    assert {tensor.dtype for tensor in (norm, module[1].running_mean)} == {torch.float32}


def test_the_loss_scale_falls_at_once_and_rises_after_many_good_steps(alone: None) -> None:
    scale, good, bad = LossScale(), [torch.ones(3)], [torch.ones(3), torch.tensor([1.0, float("inf")])]
    assert not scale.overflowed(good)
    assert scale.overflowed(bad) and scale.overflowed([torch.tensor([float("nan")], dtype=torch.float16)])
    assert scale.value == INITIAL / 4
    scale.load_state_dict({**scale.state_dict(), "loss_scale_good_steps": GROWS_AFTER_STEPS - 1})
    assert not scale.overflowed(good)
    assert scale.value == INITIAL / 2
    again = LossScale()
    again.load_state_dict(scale.state_dict())
    assert again.state_dict() == scale.state_dict() == {"loss_scale": INITIAL / 2, "loss_scale_good_steps": 0}


def test_gradients_that_overflow_without_a_scale_end_training_with_what_to_try(alone: None) -> None:
    scale = LossScale()
    scale.load_state_dict({"loss_scale": 1.0, "loss_scale_good_steps": 5})
    with pytest.raises(ArithmeticError, match=r'loss scale of 1.*try training.precision = "bf16"'):
        scale.overflowed([torch.tensor([float("inf")])])


def stepped(optimizer: torch.optim.Optimizer, weight: Any, gradient: float) -> None:
    weight.grad = torch.full_like(weight, gradient)
    optimizer.step()
