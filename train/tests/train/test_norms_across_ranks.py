"""Norms on four ranks are those of whole parameters and of the whole gradient, under every cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from ranks import run_ranks, values

STEPS = 3
# The number of ranks divides no size: parts differ in size, and some ranks have none of the three rows.
SHAPES = ((7, 5), (5,), (3, 6))


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """The results of each rank."""
    return values(run_ranks(_rank, 4, timeout_s=150))


def test_lars_and_lamb_learn_the_same_when_cut_over_two_axes(found: list[dict[str, Any]]) -> None:
    for rank in found:
        for kind in "LARS", "LAMB":
            # f64: sums of a norm's squares in another order.
            assert rank[kind]["difference"] < 1e-13
            assert rank[kind]["moved"] > 1e-3


def test_all_norms_need_one_all_reduce_per_axis_that_cuts_a_parameter(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["LARS"]["calls"] == rank["LAMB"]["calls"] == {"data": STEPS, "tensor": STEPS, "pipeline": 0}


def test_lars_and_lamb_learn_the_same_under_fsdp(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["fsdp"]["LARS"] < 1e-13
        assert rank["fsdp"]["LAMB"] < 1e-13


def test_lars_and_lamb_learn_the_same_inside_zero_redundancy_optimizer(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["zero"] == {"LARS": 0.0, "LAMB": 0.0}


def test_a_clipped_norm_counts_every_element_of_shards_and_stages_once(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["clip"]["norm"] == pytest.approx(rank["clip"]["of_whole"], rel=1e-14)
        assert rank["clip"]["after"] == pytest.approx(0.5, rel=1e-14)
    assert len({rank["clip"]["norm"] for rank in found}) == 1, "ranks would scale by different numbers"


def test_a_gradient_that_is_a_term_of_a_sum_is_summed_first(found: list[dict[str, Any]]) -> None:
    for rank in found:
        # Each of the two ranks of the axis holds ones in 4 places, whose sums are twos.
        assert rank["partial"] == {"norm": 4.0, "gradient": [1.0] * 4}


def test_parameters_that_all_ranks_hold_whole_are_clipped_without_communication(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["whole"] == {"norm": 5.0, "gradient": [1.5, 2.0], "calls": 0}


def test_diloco_ranks_have_a_norm_each(found: list[dict[str, Any]]) -> None:
    # Rank (data, tensor) has gradient 3 (data + 1) cut over tensor in two, and 4 (data + 1) whole on both.
    assert [rank["apart"] for rank in found] == [(18 + 16) ** 0.5, (18 + 16) ** 0.5, 136**0.5, 136**0.5]


def test_a_norm_that_is_not_a_number_stays_so(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["not_finite"] == "nan"


class Held:
    """A replica of given parameters."""

    def __init__(self, parameters: dict[str, Any]) -> None:
        self.parameters = parameters

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        return iter(self.parameters.items())


def _rank(rank: int, size: int, folder: str) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from netfold_train.parallel.mesh import Mesh
    from netfold_train.recipe import Parallel

    torch.set_num_threads(1)
    dist.init_process_group("netfold", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    try:
        flat, deep = Mesh(Parallel(data=2, tensor=2)), Mesh(Parallel(pipeline=2, tensor=2))
        return {
            **{kind: _cut(kind, flat) for kind in ("LARS", "LAMB")},
            "fsdp": {kind: _fsdp(kind, flat) for kind in ("LARS", "LAMB")},
            "zero": {kind: _zero(kind) for kind in ("LARS", "LAMB")},
            "clip": _clip(deep),
            "partial": _partial(flat),
            "whole": _whole(flat),
            "apart": _apart(flat),
            "not_finite": _not_finite(deep),
        }
    finally:
        dist.destroy_process_group()


def _optimizer(kind: str, parameters: Any) -> Any:
    from netfold_train.optim import LAMB, LARS

    if kind == "LARS":
        return LARS(parameters, lr=0.5, momentum=0.9, weight_decay=0.02, trust=0.1)
    return LAMB(parameters, lr=0.05, weight_decay=0.02)


def _drawn(seed: int) -> list[Any]:
    """The same on every rank."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def _alone(kind: str) -> list[Any]:
    whole = [w.requires_grad_() for w in _drawn(0)]
    optimizer = _optimizer(kind, whole)
    for step in range(STEPS):
        for w, gradient in zip(whole, _drawn(1 + step), strict=True):
            w.grad = gradient
        optimizer.step()
    return [w.detach() for w in whole]


def _calls(axis: Any) -> int:
    import netfold.torch

    return len(netfold.torch.events(axis.group))


def _cut(kind: str, mesh: Any) -> dict[str, Any]:
    import torch
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    plane = mesh.device_mesh["replicate", "tensor"]
    places = [(Shard(0), Shard(1)), (Replicate(), Shard(0)), (Shard(0), Replicate())]

    def put(tensors: list[Any]) -> list[Any]:
        return [
            distribute_tensor(t, plane, place, src_data_rank=None) for t, place in zip(tensors, places, strict=True)
        ]

    cut = [torch.nn.Parameter(w) for w in put(_drawn(0))]
    optimizer = _optimizer(kind, cut)
    axes = mesh.data, mesh.tensor, mesh.pipeline
    before = {axis.name: _calls(axis) for axis in axes}
    for step in range(STEPS):
        for w, gradient in zip(cut, put(_drawn(1 + step)), strict=True):
            w.grad = gradient
        optimizer.step()
    calls = {axis.name: _calls(axis) - before[axis.name] for axis in axes}
    whole = [w.detach().full_tensor() for w in cut]
    return {
        "calls": calls,
        "difference": max(float((a - b).abs().max()) for a, b in zip(whole, _alone(kind), strict=True)),
        "moved": min(float((a - b).abs().max()) for a, b in zip(whole, _drawn(0), strict=True)),
    }


def _fsdp(kind: str, mesh: Any) -> float:
    """The same weights and gradients, in a module that FSDP2 cuts: its loss is the sum of w g."""
    import torch
    from torch.distributed.fsdp import fully_shard

    class Products(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = torch.nn.ParameterList(_drawn(0))

        def forward(self, *by: Any) -> Any:
            return sum((w * g).sum() for w, g in zip(self.held, by, strict=True))

    module = Products()
    fully_shard(module, mesh=mesh.fsdp_mesh)
    optimizer = _optimizer(kind, list(module.parameters()))
    for step in range(STEPS):
        optimizer.zero_grad()
        module(*_drawn(1 + step)).backward()
        optimizer.step()
    whole = [w.detach().full_tensor() for w in module.parameters()]
    return max(float((a - b).abs().max()) for a, b in zip(whole, _alone(kind), strict=True))


def _zero(kind: str) -> float:
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer

    whole = [torch.nn.Parameter(w) for w in _drawn(0)]
    model = _optimizer(kind, whole)
    optimizer = ZeroRedundancyOptimizer(whole, type(model), **model.defaults)
    for step in range(STEPS):
        for w, gradient in zip(whole, _drawn(1 + step), strict=True):
            w.grad = gradient
        optimizer.step()
    return max(float((a - b).abs().max()) for a, b in zip(whole, _alone(kind), strict=True))


def _clip(mesh: Any) -> dict[str, float]:
    """Two stages, each with a weight cut in two and a norm that both tensor ranks hold: 2 x 2 ranks."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Shard

    from netfold_train.optim.step import Clip

    generator = torch.Generator().manual_seed(3)
    whole = {f"stage{s}.{what}": torch.randn(7, generator=generator).double() for s in range(2) for what in "wn"}
    stage, line = mesh.pipeline.rank, mesh.device_mesh["tensor"]
    held: dict[str, Any] = {}
    for what in "wn":
        gradient = whole[f"stage{stage}.{what}"]
        if what == "w":
            piece = gradient.chunk(2)[mesh.tensor.rank].clone()
            gradient = DTensor.from_local(piece, line, [Shard(0)], shape=torch.Size([7]), stride=(1,))
        held[f"stage{stage}.{what}"] = torch.nn.Parameter(torch.zeros_like(gradient))
        held[f"stage{stage}.{what}"].grad = gradient.clone()
    norm = Clip(Held(held), 0.5).clip()
    after = sum((p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).square().sum() for p in held.values())
    dist.all_reduce(after, group=mesh.pipeline.group)
    return {
        "norm": norm,
        "of_whole": float(torch.cat(list(whole.values())).norm()),
        "after": float(after) ** 0.5,
    }


def _partial(mesh: Any) -> dict[str, Any]:
    import torch
    from torch.distributed.tensor import DTensor, Partial, Replicate

    from netfold_train.optim.step import Clip
    from netfold_train.parallel.shards import settle

    line = mesh.device_mesh["tensor"]
    held = torch.nn.Parameter(DTensor.from_local(torch.zeros(4), line, [Replicate()]))
    held.grad = DTensor.from_local(torch.ones(4), line, [Partial()])
    settle([held])
    norm = Clip(Held({"norm.weight": held}), 2.0).clip()
    return {"norm": norm, "gradient": held.grad.to_local().tolist()}


def _whole(mesh: Any) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    import netfold.torch
    from netfold_train.optim.step import Clip

    held = torch.nn.Parameter(torch.zeros(2))
    held.grad = torch.tensor([3.0, 4.0])
    clip = Clip(Held({"w": held}), 2.5)
    before = len(netfold.torch.events(dist.group.WORLD))
    norm = clip.clip()
    return {
        "norm": norm,
        "gradient": held.grad.tolist(),
        "calls": len(netfold.torch.events(dist.group.WORLD)) - before,
    }


def _apart(mesh: Any) -> float:
    import torch
    from torch.distributed.tensor import DTensor, Shard

    from netfold_train.optim.step import Clip

    own = mesh.data.rank + 1.0
    cut = DTensor.from_local(torch.zeros(1), mesh.device_mesh["tensor"], [Shard(0)])
    held = {"cut": torch.nn.Parameter(cut), "whole": torch.nn.Parameter(torch.zeros(1))}
    held["cut"].grad = torch.full_like(cut, 3 * own)
    held["whole"].grad = torch.tensor([4 * own])
    return Clip(Held(held), 1.0, island=mesh.same_samples()).clip()


def _not_finite(mesh: Any) -> str:
    import torch

    from netfold_train.optim.step import Clip

    name = f"stage{mesh.pipeline.rank}"
    held = torch.nn.Parameter(torch.zeros(1))
    held.grad = torch.tensor([float("nan") if mesh.pipeline.rank else 1.0])
    return str(Clip(Held({name: held}), 1.0).clip())
