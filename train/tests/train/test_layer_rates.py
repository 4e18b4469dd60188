"""LARS and LAMB on four ranks that hold parts as plain tensors: the rate of a layer is that of the whole layer."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from ranks import run_ranks, values

STEPS, BATCH, LENGTH = 3, 8, 8
KINDS: dict[str, dict[str, Any]] = {
    "lars": {"name": "lars", "lr": 0.5, "momentum": 0.9, "weight_decay": 0.02, "trust": 0.1},
    # An eps that is more than a gradient's rounding: Adam's first direction is all signs.
    "lamb": {"name": "lamb", "lr": 0.05, "eps": 1e-4, "weight_decay": 0.02},
}
GPT = {"name": "gpt", "vocabulary": 32, "context": LENGTH, "width": 16, "heads": 2, "layers": 2}
DLRM = {"name": "dlrm", "numbers": 2, "rows": (16, 3, 105), "width": 8, "bottom": [16], "top": [16, 8]}
SPLITS: dict[str, dict[str, Any]] = {
    "data x tensor": {"data": 2, "tensor": 2},
    "data x tensor, ZeRO 1": {"data": 2, "tensor": 2, "zero": 1},
    "pipeline x tensor": {"pipeline": 2, "tensor": 2, "microbatches": 2},
    "tables by rows": {"embeddings": "row_wise"},
    "tables by rows x tensor": {"data": 2, "tensor": 2, "embeddings": "row_wise"},
}
# The number of ranks divides no size, so parts differ in size.
SHAPES = {"first": (7, 5), "bias": (5,), "last": (3, 6)}


@pytest.fixture(scope="module")
def found() -> list[dict[Any, Any]]:
    """The results of each rank."""
    return values(run_ranks(_rank, 4, timeout_s=240))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_of_a_layer_learn_the_same_as_the_layer_on_one_process(
    found: list[dict[Any, Any]], kind: str, split: str
) -> None:
    for rank in found:
        off, of_one_bit = rank[kind, split]
        # Sums of some hundreds of f64 in another order, several per step. A part's own rate would differ by 1e-3.
        assert off < 100 * of_one_bit < 1e-8


def test_norms_need_one_all_reduce_per_axis(found: list[dict[Any, Any]]) -> None:
    # Two norms of 8 bytes per layer.
    for rank in found:
        assert rank["unequal"]["norms"] == {"tensor": [16] * STEPS, "data": [16] * STEPS}


def test_parts_of_unequal_size_learn_the_same_as_the_whole(found: list[dict[Any, Any]]) -> None:
    for rank in found:
        assert rank["unequal"]["off"] < 1e-13


def test_f32_master_weights_of_bf16_parts_learn_the_same_as_those_of_the_whole(found: list[dict[Any, Any]]) -> None:
    for rank in found:
        # f32, and the same bf16 gradients: only norms were summed in another order.
        assert rank["unequal, bf16"]["off"] < 1e-6


def test_a_layer_without_a_gradient_on_one_rank_makes_no_rank_wait(found: list[dict[Any, Any]]) -> None:
    for number, rank in enumerate(found):
        # lr trust |w| / |g| g of the whole: eight weights of 1, four gradients of 3, and 0 in the other rank's four.
        moved = 0.0 if number % 2 else 0.5 * 0.1 * (8**0.5 / 6) * 3
        assert rank["no gradient"] == pytest.approx(moved, rel=1e-14)


def _rank(rank: int, size: int, folder: str) -> dict[Any, Any]:
    import torch
    import torch.distributed as dist

    from netfold_train.parallel.mesh import Mesh
    from netfold_train.recipe import Parallel

    torch.set_num_threads(1)
    dist.init_process_group("netfold", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    try:
        flat = Mesh(Parallel(data=2, tensor=2))
        found: dict[Any, Any] = {"unequal, bf16": _unequal(flat, "bf16"), "no gradient": _no_gradient(flat)}
        torch.set_default_dtype(torch.float64)
        found |= {(kind, split): _learnt(kind, split) for kind in KINDS for split in SPLITS}
        return found | {"unequal": _unequal(flat)}
    finally:
        dist.destroy_process_group()


def _recipe(kind: str, model: Any, parallel: dict[str, Any], precision: str = "f32") -> Any:
    from netfold_train.recipe import Recipe

    return Recipe.model_validate(
        {
            "model": model,
            "data": {"name": "given"},
            "training": {"steps": STEPS, "batch": BATCH, "precision": precision},
            "optimizer": KINDS[kind],
            "parallel": parallel,
        }
    )


class _Drawn:
    """Examples for either model, the same on every rank."""

    def __init__(self, kind: str) -> None:
        import torch

        generator = torch.Generator().manual_seed(7)
        count = STEPS * BATCH
        if kind == "gpt":
            tokens = torch.randint(GPT["vocabulary"], (count, LENGTH + 1), generator=generator)
            self._inputs, self._target = (tokens[:, :-1],), tokens[:, 1:]
        else:
            asked = [torch.randint(rows, (count,), generator=generator) for rows in DLRM["rows"]]
            self._inputs = torch.randn(count, 2, generator=generator), torch.stack(asked, 1)
            self._target = torch.rand(count, generator=generator).round()

    def __len__(self) -> int:
        return len(self._target)

    def batch(self, indices: Any, seeds: Any) -> Any:
        from netfold_train import Batch

        chosen = list(indices)
        return Batch(tuple(each[chosen] for each in self._inputs), self._target[chosen])


def _learnt(kind: str, split: str) -> tuple[float, float]:
    """Measure how far a parameter of this rank is, at most, from that of one process; and how far those of one
    process are from its own where each weight begins with its last bit changed."""
    import torch
    from torch.distributed.tensor import DTensor
    from torch.nn import functional

    from netfold_train.models import make_model
    from netfold_train.optim import kind_of, make_optimizer
    from netfold_train.parallel import parallelise
    from netfold_train.parallel.mesh import Mesh

    recipe = _recipe(kind, DLRM if "tables" in split else GPT, SPLITS[split])
    examples = _Drawn(recipe.model.name)
    batches = [examples.batch(range(step * BATCH, (step + 1) * BATCH), ()) for step in range(STEPS)]
    torch.manual_seed(3)
    model = make_model(recipe.model)
    if recipe.model.name == "gpt":
        # The model's own loss makes logits f32.
        model = dataclasses.replace(
            model, loss=lambda logits, target: functional.cross_entropy(logits.mT, target, reduction="none")
        )
    for weight in model.module.parameters():
        if weight.ndim > 1:
            # Parts whose own norms would give another rate, along either dimension.
            weight.data[: len(weight) // 2] *= 4
            weight.data[:, : weight.shape[1] // 2] *= 4
    of, options = kind_of(recipe.optimizer)

    def learnt_alone(factor: float) -> dict[str, torch.Tensor]:
        alone = copy.deepcopy(model)
        for weight in alone.module.parameters():
            weight.data *= factor
        whole = of(alone.module.parameters(), **options)
        for batch in batches:
            whole.zero_grad()
            alone.losses(alone.module(*batch.inputs), batch.target).mean().backward()
            whole.step()
        return {name: weight.detach() for name, weight in alone.module.named_parameters()}

    expected, moved = learnt_alone(1.0), learnt_alone(1 + torch.finfo(torch.float64).eps)
    of_one_bit = max(float((moved[name] - weight).norm()) for name, weight in expected.items())

    mesh = Mesh(recipe.parallel)
    replica = parallelise(model, recipe, mesh, examples)
    optimizer = make_optimizer(replica, recipe)
    for batch in batches:
        optimizer.zero_grad()
        replica.gradients(batch.parts(mesh.data.size)[mesh.data.rank])
        optimizer.step()
    off = 0.0
    for name, held in replica.named_parameters():
        part: Any = held.detach()
        part = part.full_tensor() if isinstance(part, DTensor) else part
        off = max(off, float((part - expected[name]).norm()))
    return off, of_one_bit


class _Held:
    """A replica of given parameters."""

    def __init__(self, parameters: dict[str, Any]) -> None:
        self.parameters = parameters

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        return iter(self.parameters.items())


def _unequal(mesh: Any, precision: str = "f32") -> dict[str, Any]:
    """Steps of LAMB; layers compute in bf16, and the optimizer steps on f32.

    The first layer is cut over tensor, the last one, by rows, over data.
    """
    import torch
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    from netfold_train.optim import kind_of, make_optimizer

    axes = {"first": "tensor", "last": "data"}

    def drawn(seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}

    def put(tensors: dict[str, Any]) -> dict[str, Any]:
        cut = {
            name: distribute_tensor(
                tensors[name],
                (mesh.data_mesh if axis == "data" else mesh.device_mesh["tensor"]),
                [Shard(0)],
                src_data_rank=None,
            )
            for name, axis in axes.items()
        }
        return {**{name: tensor.clone() for name, tensor in tensors.items()}, **cut}

    held = {name: torch.nn.Parameter(w) for name, w in put(drawn(0)).items()}
    whole = {name: torch.nn.Parameter(tensor) for name, tensor in drawn(0).items()}
    recipe = _recipe("lamb", {"name": "given"}, {"tensor": 2}, precision)
    replica = _Held(held)
    optimizer = make_optimizer(replica, recipe)  # type: ignore[arg-type]
    kind, options = kind_of(recipe.optimizer)
    alone: Any = kind(whole.values(), **options)
    norms: dict[str, list[int]] = {"tensor": [], "data": []}
    for step in range(STEPS):
        gradients = drawn(1 + step)
        for tensors, given in ((whole, gradients), (held, put(gradients))):
            for name, gradient in given.items():
                tensors[name].grad = gradient
        before = {axis: len(_all_reduces(mesh, axis)) for axis in norms}
        optimizer.step()
        alone.step()
        for axis, sizes in norms.items():
            sizes += _all_reduces(mesh, axis)[before[axis] :]
    off = 0.0
    for name, w in held.items():
        part: Any = w.detach()
        part = part.full_tensor() if isinstance(part, DTensor) else part
        off = max(off, float((part - whole[name].detach()).abs().max()))
    return {"off": off, "norms": norms}


def _all_reduces(mesh: Any, axis: str) -> list[int]:
    """The bytes of each call."""
    import netfold.torch
    from netfold._native import engine

    kinds = {number: name for name, number in engine.KINDS.items()}
    events = netfold.torch.events(getattr(mesh, axis).group)
    return [int(event["bytes"]) for event in events if kinds[int(event["operation"])] == "all_reduce"]


def _no_gradient(mesh: Any) -> float:
    import torch
    from torch.distributed.tensor import DTensor, Shard

    from netfold_train.optim import LARS
    from netfold_train.parallel.shards import local

    part = torch.ones(2, 2, dtype=torch.float64)
    w = torch.nn.Parameter(DTensor.from_local(part, mesh.device_mesh["tensor"], [Shard(0)], run_check=False))
    optimizer = LARS([w], lr=0.5, trust=0.1)
    if mesh.tensor.rank == 0:
        w.grad = torch.full_like(w, 3.0)
    optimizer.step()
    return 1.0 - float(local(w.detach())[0, 0])
