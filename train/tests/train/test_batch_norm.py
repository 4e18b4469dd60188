"""Two groups of two ranks: each normalises as torch's batch norm does on one process with the group's whole batch."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from ranks import run_ranks, values


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """The results of each rank."""
    return values(run_ranks(_rank, 4, timeout_s=150))


def test_two_ranks_normalise_as_one_rank_with_both_batches(found: list[dict[str, Any]]) -> None:
    """In f64, with unequal numbers of samples: outputs, gradients of x, weight and bias, running statistics."""
    for rank in found:
        for case in "images", "rows", "unaffine", "cumulative":
            assert max(rank[case].values()) < 1e-12, f"{case}: {rank[case]}"


def test_two_runs_of_ranks_are_independent(found: list[dict[str, Any]]) -> None:
    assert found[0]["running"] == found[1]["running"]
    assert found[2]["running"] == found[3]["running"]
    assert found[0]["running"] != found[2]["running"]


def test_the_gradient_equals_finite_differences(found: list[dict[str, Any]]) -> None:
    """For every element, through the outputs of both ranks. Central differences in f64, step 1e-6: errors of 1e-9."""
    for rank in found:
        assert rank["finite differences"] < 1e-7


def test_a_variance_far_smaller_than_the_mean_is_not_lost(found: list[dict[str, Any]]) -> None:
    """f32 around 1000, spread 0.01: sums of squares would round it away. The mean's own rounding is 2^-15, a three
    hundredth of the spread."""
    for rank in found:
        assert rank["far from 0"] < 5e-3


def test_bf16_input_gives_bf16_output_and_is_normalised_in_f32(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["bf16"]["dtypes"] == ["torch.bfloat16", "torch.bfloat16", "torch.float32"]
        # Only the output is rounded: by half a unit of 2^-8 of values up to 4.
        assert rank["bf16"]["difference"] <= 4 * 2.0**-9


def test_a_rank_without_samples_takes_part(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["empty"] < 1e-12


def test_evaluation_uses_the_running_statistics_without_communication(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["evaluation"] == {"difference": 0.0, "calls": 0, "unchanged": True}


def test_replacing_layers_keeps_names_and_parameters(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["kept"]


def test_a_model_whose_ranks_all_normalise_together_has_the_gradients_of_one_process(
    found: list[dict[str, Any]],
) -> None:
    """Through `parallelise` and DDP, with four ranks in one group."""
    for rank in found:
        assert rank["trained"] < 1e-12


def test_invalid_settings_are_errors(found: list[dict[str, Any]]) -> None:
    for rank in found:
        divides, nothing, single = rank["refused"]
        assert "parallel.batch_norm is 3" in divides and "set one of 1, 2, 4" in divides
        assert "no layer of batch norm" in nothing
        assert "needs several values per channel" in single


def _rank(rank: int, size: int, folder: str) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from netfold_train.parallel.batch_norm import SubGroupBatchNorm, convert_batch_norm
    from netfold_train.parallel.mesh import Mesh
    from netfold_train.recipe import Parallel

    torch.set_num_threads(1)
    dist.init_process_group("netfold", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    try:
        mesh = Mesh(Parallel(data=4))
        box = torch.nn.Sequential(torch.nn.BatchNorm2d(2))
        convert_batch_norm(box, 2, mesh)
        made = box[0]
        assert isinstance(made, SubGroupBatchNorm)
        return {
            "images": _compared(torch.nn.BatchNorm2d(3), (3, 4, 2), made.group),
            "rows": _compared(torch.nn.BatchNorm1d(3), (3,), made.group),
            "unaffine": _compared(torch.nn.BatchNorm1d(3, affine=False), (3, 5), made.group),
            "cumulative": _compared(torch.nn.BatchNorm2d(3, momentum=None), (3, 2, 2), made.group),
            "running": _running(made),
            "finite differences": _finite_differences(made.group),
            "far from 0": _far(made.group),
            "bf16": _bf16(made.group),
            "empty": _empty(made.group),
            "evaluation": _evaluation(made.group),
            "kept": _kept(mesh),
            "trained": _trained(mesh),
            "refused": _refused(mesh, made.group),
        }
    finally:
        dist.destroy_process_group()


def _batches(shape: tuple[int, ...], samples: tuple[int, int] = (5, 2)) -> tuple[Any, Any, slice]:
    """x and a gradient of the outputs of this rank's group, f64, and the samples of this rank."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank // 2)
    x, by = (torch.randn(sum(samples), *shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return x * 3 + 1, by, slice(samples[0]) if rank % 2 == 0 else slice(samples[0], None)


def _compared(norm: Any, shape: tuple[int, ...], group: Any, samples: tuple[int, int] = (5, 2)) -> dict[str, float]:
    """The largest differences from torch's layer on both ranks' samples, after two steps."""
    import copy

    import torch
    import torch.distributed as dist

    from netfold_train.parallel.batch_norm import SubGroupBatchNorm

    whole = norm.double()
    if whole.affine:
        with torch.no_grad():
            whole.weight.copy_(torch.tensor([0.5, 1.5, -2.0]))
            whole.bias.copy_(torch.tensor([1.0, 0.0, -1.0]))
    parts = SubGroupBatchNorm.of(copy.deepcopy(whole), group)
    x, by, mine = _batches(shape, samples)
    differences: dict[str, float] = {}
    for _ in range(2):
        x = x * 1.5 - 0.25
        all_x, own_x = x.clone().requires_grad_(), x[mine].clone().requires_grad_()
        of_all, own = whole(all_x), parts(own_x)
        (of_all * by).sum().backward()
        (own * by[mine]).sum().backward()
        differences["output"] = _greatest(own - of_all[mine])
        differences["x"] = _greatest(own_x.grad - all_x.grad[mine])
    for name in ("weight", "bias") if whole.affine else ():
        gradient = getattr(parts, name).grad.clone()
        dist.all_reduce(gradient, group=group)
        differences[name] = _greatest(gradient - getattr(whole, name).grad)
    for name in "running_mean", "running_var", "num_batches_tracked":
        differences[name] = _greatest(getattr(parts, name) - getattr(whole, name))
    return differences


def _greatest(difference: Any) -> float:
    return float(difference.detach().abs().max()) if difference.numel() else 0.0


def _running(norm: Any) -> list[float]:
    import torch

    norm(_batches((2, 3, 3))[0][:2].to(torch.float32))
    values: list[float] = [*norm.running_mean.tolist(), *norm.running_var.tolist()]
    return values


def _finite_differences(group: Any) -> float:
    import torch
    import torch.distributed as dist

    from netfold_train.parallel.batch_norm import SubGroupBatchNorm

    norm = SubGroupBatchNorm.of(torch.nn.BatchNorm1d(2).double(), group)
    x, by, mine = _batches((2, 2), (3, 2))
    own = x[mine].clone().requires_grad_()
    (norm(own) * by[mine]).sum().backward()
    assert own.grad is not None
    worst, step = 0.0, 1e-6
    for place in range(x.numel()):
        sums = []
        for sign in 1, -1:
            moved = x.clone()
            moved.view(-1)[place] += sign * step
            total = (norm(moved[mine]) * by[mine]).sum().detach()
            dist.all_reduce(total, group=group)
            sums.append(total)
        told = torch.zeros_like(x)
        told[mine] = own.grad
        dist.all_reduce(told, group=group)
        worst = max(worst, abs(float((sums[0] - sums[1]) / (2 * step) - told.view(-1)[place])))
    return worst


def _far(group: Any) -> float:
    import torch

    from netfold_train.parallel.batch_norm import SubGroupBatchNorm

    norm = SubGroupBatchNorm.of(torch.nn.BatchNorm1d(1, eps=1e-12), group)
    _, by, mine = _batches((1, 400))
    x = (1000 + 0.01 * by).float()
    told = torch.nn.BatchNorm1d(1, eps=1e-12).double()(x.double())
    return _greatest(norm(x[mine]) - told[mine])


def _bf16(group: Any) -> dict[str, Any]:
    import torch

    from netfold_train.parallel.batch_norm import SubGroupBatchNorm

    norm = SubGroupBatchNorm.of(torch.nn.BatchNorm1d(3), group)
    x, by, mine = _batches((3, 4))
    whole = torch.nn.BatchNorm1d(3)(x.bfloat16().float())
    own = x.bfloat16()[mine].requires_grad_()
    output = norm(own)
    (output * by[mine].bfloat16()).sum().backward()
    assert own.grad is not None and norm.weight.grad is not None
    return {
        "dtypes": [str(each.dtype) for each in (output, own.grad, norm.weight.grad)],
        "difference": _greatest(output.float() - whole[mine]),
    }


def _empty(group: Any) -> float:
    import torch

    return max(_compared(torch.nn.BatchNorm1d(3), (3, 2), group, samples=(4, 0)).values())


def _evaluation(group: Any) -> dict[str, Any]:
    import copy

    import torch

    import netfold.torch
    from netfold_train.parallel.batch_norm import SubGroupBatchNorm

    whole = torch.nn.BatchNorm1d(3)
    whole(torch.arange(12.0).view(4, 3))
    parts = SubGroupBatchNorm.of(copy.deepcopy(whole), group)
    whole.eval()
    parts.eval()
    before, mean = len(netfold.torch.events(group)), parts.running_mean.clone()
    x = torch.arange(6.0).view(2, 3)
    return {
        "difference": _greatest(parts(x) - whole(x)),
        "calls": len(netfold.torch.events(group)) - before,
        "unchanged": torch.equal(parts.running_mean, mean),
    }


def _kept(mesh: Any) -> bool:
    from torch import nn

    from netfold_train.parallel.batch_norm import SubGroupBatchNorm, convert_batch_norm

    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Sequential(nn.BatchNorm2d(2), nn.ReLU()))
    before = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    convert_batch_norm(model, 4, mesh)
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    same = before.keys() == after.keys() and all(before[name] is after[name] for name in before)
    return same and isinstance(model[1][0], SubGroupBatchNorm) and model[1][0].group.size() == 4


def _trained(mesh: Any) -> float:
    """The largest difference of a gradient."""
    import torch
    from torch.nn import functional

    from netfold_train.data.examples import Batch
    from netfold_train.models.model import Model
    from netfold_train.parallel import parallelise
    from netfold_train.recipe import Recipe

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.ReLU(), torch.nn.Linear(5, 1)
        ).double()

    recipe = Recipe.model_validate(
        {
            "model": {"name": "m"},
            "data": {"name": "d"},
            "training": {"steps": 1},
            "parallel": {"data": 4, "batch_norm": 4},
        }
    )
    generator = torch.Generator().manual_seed(9)
    x, y = torch.randn(8, 3, generator=generator).double(), torch.randn(8, 1, generator=generator).double()
    whole = model()
    functional.mse_loss(whole(x), y).backward()
    replica = parallelise(Model(model(), functools.partial(functional.mse_loss, reduction="none")), recipe, mesh)
    mine = slice(2 * mesh.data.rank, 2 * mesh.data.rank + 2)
    replica.gradients(Batch((x[mine],), y[mine]))
    return max(
        _greatest(own.grad - alone.grad)
        for (_, own), alone in zip(replica.named_parameters(), whole.parameters(), strict=True)
    )


def _refused(mesh: Any, group: Any) -> list[str]:
    import torch
    from torch import nn

    from netfold_train.parallel.batch_norm import SubGroupBatchNorm, convert_batch_norm

    said = []
    single = SubGroupBatchNorm.of(nn.BatchNorm1d(2), group)
    rank_has = 1 - mesh.data.rank % 2
    for act in (
        lambda: convert_batch_norm(nn.Sequential(nn.BatchNorm1d(2)), 3, mesh),
        lambda: convert_batch_norm(nn.Sequential(nn.Linear(2, 2)), 2, mesh),
        lambda: single(torch.ones(rank_has, 2)),
    ):
        try:
            act()
            said.append("not refused")
        except ValueError as error:
            said.append(str(error))
    return said
