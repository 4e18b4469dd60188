"""A GPT and a BERT learn the same with whole sequences and with sequences that ranks share."""

from __future__ import annotations

import math
from typing import Any

import pytest
from ranks import run_ranks, values
from training import TINY_GPT, Table, changed

pytestmark = pytest.mark.torch

# Four heads: a run of four ranks has one each.
GPT = changed(TINY_GPT, training={"batch": 8, "clip": 0.5})
BERT = changed(GPT, model={"name": "bert"}, data={"name": "masked-source"})
CASES: dict[str, tuple[Table, Table]] = {
    "context 2": ({"context": 2}, {}),
    "context 4": ({"context": 4}, {}),
    "context 2, two parts of a batch": ({"context": 2}, {"accumulate": 2}),
    "context 2, zero 3": ({"context": 2, "zero": 3}, {}),
    "context 2, recomputed": ({"context": 2}, {"recompute": "all"}),
    "context 2 x tensor 2": ({"context": 2, "tensor": 2}, {}),
    "context 2 x pipeline 2": ({"context": 2, "pipeline": 2}, {}),
    "context 2 x pipeline 2, interleaved": (
        {"context": 2, "pipeline": 2, "schedule": "interleaved", "microbatches": 4},
        {"recompute": "all"},
    ),
    "context 2 x pipeline 2, zero 3": ({"context": 2, "pipeline": 2, "zero": 3, "microbatches": 4}, {}),
    "context 2 x pipeline 2, zero-bubble": ({"context": 2, "pipeline": 2, "schedule": "zero-bubble"}, {}),
    "context 2 x pipeline 2, zero-bubble-v": ({"context": 2, "pipeline": 2, "schedule": "zero-bubble-v"}, {}),
}
MODELS = {"gpt": GPT, "bert": BERT}
# f64: sums of at most some hundred terms in another order, some tens of them in sequence.
CLOSE = 1e-11


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """The results of each of four ranks."""
    return values(run_ranks(_world, 4, timeout_s=240))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("case", CASES)
def test_losses_and_metric_are_those_of_whole_sequences(found: list[dict[str, Any]], model: str, case: str) -> None:
    whole = found[0][model, "whole"]
    for rank in found:
        assert rank[model, case] == pytest.approx(whole, rel=CLOSE)
    assert len(set(whole)) == 5  # four losses, which differ, and the metric


def test_attention_exchanges_heads_and_nothing_else(found: list[dict[str, Any]]) -> None:
    # In each of four layers: queries, keys and values together, then the results.
    for rank in found:
        assert rank["calls"] == [{"all_to_all_single": 2 * 4}, {"all_to_all_single": 2 * 4}]


def test_outputs_for_a_file_are_those_of_whole_sequences(found: list[dict[str, Any]]) -> None:
    # Runs of two ranks share samples, and one of them writes.
    names = [f"predictions-{number:05}-of-00002.safetensors" for number in (1, 2)]
    assert sorted(found[0]["predicted"]) == names
    assert found[0]["difference"] < CLOSE


@pytest.mark.parametrize(
    "keys, said",
    [
        ({"parallel": {"context": 3}}, "parallel.context is 3, which does not divide the 4 data-parallel ranks"),
        (
            {"parallel": {"context": 4}, "data": {"context": 30}},
            "context is 4, which does not divide the tokens",
        ),
        ({"parallel": {"context": 2}, "model": {"name": "gpt-moe"}}, "parallel.context is 2, but the model's layers"),
        ({"parallel": {"context": 2}, "diloco": {"every": 2}}, "parallel.context = 2 does not go with diloco.every"),
    ],
)
def test_what_cannot_be_cut_is_an_error(keys: Table, said: str) -> None:
    from netfold_train import Recipe
    from netfold_train.dry_run.validate import validate_recipe

    with pytest.raises(ValueError) as caught:
        validate_recipe(Recipe.model_validate(changed(GPT, **keys)), 4)
    assert said in str(caught.value)


def test_a_sequence_or_heads_that_do_not_divide_are_an_error(found: list[dict[str, Any]]) -> None:
    for rank in found:
        tokens, heads = rank["refused"]
        assert "parallel.context is 4, which does not divide the tokens of a tensor of shape [8, 30]" in tokens
        assert "parallel.context is 4, but each rank has 2 heads, which it must divide" in heads


def _world(rank: int, size: int, folder: str) -> dict[Any, Any]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("netfold", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    try:
        return _learnt() | _counted() | _predicted(folder) | {"refused": _refused()}
    finally:
        dist.destroy_process_group()


def _learnt() -> dict[Any, Any]:
    from netfold_train import Recipe, Trainer

    found: dict[Any, Any] = {}
    for name, model in MODELS.items():
        for case, (parallel, training) in {"whole": ({}, {}), **CASES}.items():
            outcome = Trainer(Recipe.model_validate(changed(model, parallel=parallel, training=training))).fit()
            found[name, case] = (*outcome.losses, outcome.metric)
            assert not math.isnan(outcome.metric)
    return found


def _counted() -> dict[str, Any]:
    import torch
    from torch.distributed.tensor.debug import CommDebugMode

    from netfold_train import Recipe
    from netfold_train.models import make_model
    from netfold_train.parallel.context import cut_sequences
    from netfold_train.parallel.mesh import Mesh

    recipe = Recipe.model_validate(changed(GPT, parallel={"context": 2}))
    model = make_model(recipe.model)
    cut_sequences(model, recipe, Mesh(recipe.parallel))
    with CommDebugMode() as forward:
        loss = model.module(torch.zeros(2, 16, dtype=torch.long)).sum()
    with CommDebugMode() as backward:
        loss.backward()
    counts = [mode.get_comm_counts() for mode in (forward, backward)]
    return {"calls": [{str(op).rsplit(".", 1)[-1]: count for op, count in each.items()} for each in counts]}


def _predicted(folder: str) -> dict[str, Any]:
    """The files of predictions with context 2, and their largest difference from those without."""
    from pathlib import Path

    import torch
    import torch.distributed as dist
    from safetensors.torch import load_file

    from netfold_train import Recipe, Trainer

    read: list[dict[int, Any]] = []
    names: list[str] = []
    for context in (1, 2):
        run, out = Path(folder) / f"run{context}", Path(folder) / f"out{context}"
        out.mkdir(exist_ok=True)
        recipe = Recipe.model_validate(changed(GPT, parallel={"context": context}, training={"steps": 1}))
        Trainer(recipe, folder=run).fit()
        Trainer(recipe, folder=run).evaluate(out)
        dist.barrier()
        files = sorted(out.iterdir())
        names = [file.name for file in files]
        parts = [load_file(file) for file in files]
        read.append({int(n): o for part in parts for n, o in zip(part["number"], part["output"], strict=True)})
        dist.barrier()
    assert read[0].keys() == read[1].keys()
    return {"predicted": names, "difference": max(float(torch.dist(read[0][n], read[1][n])) for n in read[0])}


def _refused() -> list[str]:
    from netfold_train import Recipe, Trainer

    said = []
    for keys in (
        {"data": {"context": 30}, "model": {"context": 30}},
        {"model": {"heads": 2}},
    ):
        with pytest.raises(ValueError) as caught:
            Trainer(Recipe.model_validate(changed(GPT, parallel={"context": 4}, **keys))).fit()
        said.append(str(caught.value))
    return said
