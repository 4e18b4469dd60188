"""Recomputed and compiled blocks, averaged weights, and ZeRO inside runs of ranks learn what plain training does."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, values
from safetensors.torch import load_file
from training import TINY_GPT, changed

from netfold_train import Recipe, Trainer
from netfold_train.models import make_model
from netfold_train.models.model import blocks_of
from netfold_train.parallel.blocks import recompute

pytestmark = pytest.mark.torch
AVERAGED = changed(TINY_GPT, training={"steps": 4, "ema": 0.5}, checkpoint={"every": 2, "asynchronous": False})


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_recomputed_blocks_keep_less_and_have_the_same_gradients() -> None:
    kept, gradients = {}, {}
    for how in ("plain", "products", "nothing"):
        torch.manual_seed(0)
        model = make_model(Recipe.model_validate(TINY_GPT).model)
        if how != "plain":
            recompute(blocks_of(model).values(), how)  # type: ignore[arg-type]
        sizes: list[int] = []
        tokens = torch.randint(256, (4, 32))

        def keep(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model.losses(model.module(tokens), tokens).mean()
        kept[how] = sum(sizes)
        loss.backward()
        gradients[how] = [parameter.grad for parameter in model.module.parameters()]
    assert kept["nothing"] <= kept["products"] < kept["plain"] / 2
    for how in ("products", "nothing"):
        assert all(torch.equal(one, other) for one, other in zip(gradients[how], gradients["plain"], strict=True))


def test_compiled_blocks_learn_the_same(alone: None) -> None:
    plain = Trainer(Recipe.model_validate(TINY_GPT)).fit().losses
    small = changed(TINY_GPT, training={"compile": True}, model={"layers": 1})
    expected = Trainer(Recipe.model_validate(changed(TINY_GPT, model={"layers": 1}))).fit().losses
    assert Trainer(Recipe.model_validate(small)).fit().losses == pytest.approx(expected, rel=1e-4)
    assert plain != expected


def test_evaluations_use_the_average_and_training_does_not(alone: None) -> None:
    plain, averaged = (Trainer(Recipe.model_validate(each)) for each in (changed(TINY_GPT), AVERAGED))
    before = {name: each.detach().clone() for name, each in averaged.replica.named_parameters()}
    outcomes = [plain.fit(), averaged.fit()]
    assert outcomes[0].losses == outcomes[1].losses and outcomes[0].metric != outcomes[1].metric
    for (name, weight), (_, other) in zip(
        plain.replica.named_parameters(), averaged.replica.named_parameters(), strict=True
    ):
        assert torch.equal(weight, other), name
    with averaged.update.averages_in_place():
        moved = [name for name, each in averaged.replica.named_parameters() if not torch.equal(each, before[name])]
    assert moved


def test_the_average_is_resumed_and_evaluated(alone: None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole = Trainer(Recipe.model_validate(AVERAGED), folder=Path(folder) / "whole").fit()
        half = changed(AVERAGED, training={"steps": 2, "ema": 0.5}, schedule={"shape": "constant"})
        rest = changed(AVERAGED, schedule={"shape": "constant"})
        expected = Trainer(Recipe.model_validate(rest), folder=Path(folder) / "constant").fit()
        Trainer(Recipe.model_validate(half), folder=Path(folder) / "half").fit()
        resumed = Trainer(Recipe.model_validate(rest), folder=Path(folder) / "half").fit()
        evaluated = Trainer(Recipe.model_validate(rest), folder=Path(folder) / "half")
        found = evaluated.evaluate(Path(folder))
        predicted = load_file(Path(folder) / "predictions-00001-of-00001.safetensors")
        with pytest.raises(ValueError, match="no checkpoint"):
            Trainer(Recipe.model_validate(rest), folder=Path(folder) / "empty").evaluate()
    assert found[evaluated.data.metric.name] == pytest.approx(resumed.metric)
    assert len(predicted["output"]) == len(predicted["number"]) == len(evaluated.data.held_out)
    assert resumed.metric == expected.metric != whole.metric


def test_zero_inside_runs_of_ranks_learns_the_same() -> None:
    parallels: list[dict[str, Any]] = [
        {"data": 4},
        {"data": 4, "zero": 3, "shard": 2},
        {"data": 4, "zero": 1, "shard": 2},
    ]
    for found in values(run_ranks(_losses, 4, parallels)):
        for losses in found[1:]:
            assert losses == pytest.approx(found[0], rel=1e-5)


def test_a_site_of_cut_layers_averages_its_gradients() -> None:
    split: dict[str, Any] = {"data": 2, "tensor": 2}
    for found in values(run_ranks(_sites, 4, split)):
        assert found[1] == pytest.approx(found[0], rel=1e-5)


def _sites(rank: int, size: int, folder: str, split: dict[str, Any]) -> list[tuple[float, ...]]:
    """The losses without rounds, and of one site, whose outer step is the identity."""
    torch.set_num_threads(1)
    dist.init_process_group("netfold", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    rounds = {"every": 2, "sites": 1, "lr": 1.0, "momentum": 0.0}
    recipes = [changed(TINY_GPT, parallel=split), changed(TINY_GPT, parallel=split, diloco=rounds)]
    try:
        return [Trainer(Recipe.model_validate(each)).fit().losses for each in recipes]
    finally:
        dist.destroy_process_group()


def _losses(rank: int, size: int, folder: str, parallels: list[dict[str, Any]]) -> list[tuple[float, ...]]:
    torch.set_num_threads(1)
    dist.init_process_group("netfold", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    try:
        return [Trainer(Recipe.model_validate(changed(TINY_GPT, parallel=each))).fit().losses for each in parallels]
    finally:
        dist.destroy_process_group()
