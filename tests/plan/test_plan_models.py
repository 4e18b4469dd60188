"""Models of other rooms, as the planner sees them: the bench's layers, a recipe's."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from netfold.cli import app
from netfold.cli.plan_models import bench_model, bench_models, recipe_model
from netfold.plan.model import Chain, Share
from netfold.plan.model.catalogue import find_model

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize("name", bench_models())
def test_a_bench_model_has_the_parameters_and_the_arithmetic_of_its_layers(name: str) -> None:
    chain, layers = bench_model(name), find_model(name).layers
    assert chain.parameters == find_model(name).parameters
    products = sum(
        layer.flops * (1 if layer.frozen else 3) for layer in layers if any(len(s) > 1 for s in layer.shapes)
    )
    assert chain.flops == pytest.approx(products)


def test_activations_of_a_chain_grow_with_the_microbatch_and_recomputation_keeps_what_comes_in() -> None:
    chain = bench_model("resnet50")
    one, four = (sum(layer.kept_bytes for layer in chain.layers(Share(batch))) for batch in (1, 4))
    assert four == pytest.approx(4 * one)
    full = chain.layers(Share(1, recomputation="full"))
    assert [layer.kept_bytes for layer in full[1:]] == [layer.input_bytes for layer in full[1:]]
    assert all(layer.again == layer.forward for layer in full)


def test_a_chain_says_what_it_cannot_be_split_by() -> None:
    chain = bench_model("resnet50")
    with pytest.raises(ValueError, match="take tensor 1"):
        chain.layers(Share(1, tensor=2))
    with pytest.raises(ValueError, match="for transformers"):
        chain.layers(Share(1, recomputation="selective"))


@pytest.mark.torch
def test_a_recipe_becomes_a_model_and_a_job() -> None:
    model, said = recipe_model(RECIPES / "gpt.toml", ("training.batch=64",))
    assert isinstance(model, Chain) and model.parameters == 867_072
    assert said["job"]["batch"] == 64 and said["job"]["optimizer"] == "adam" and said["job"]["gpus"] == 2
    assert sum(link.kept for link in model.links) > 0 and model.flops > 0


@pytest.mark.torch
def test_a_recipe_that_is_none_is_told_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text((RECIPES / "gpt.toml").read_text().replace("batch = 32", "batsh = 32"))
    result = CliRunner().invoke(app, ["plan", "--recipe", str(file), "--cluster", "dgx-a100"])
    assert result.exit_code == 2 and "did you mean batch?" in result.output and "mine.toml:12" in result.output


def test_a_recipe_beside_a_model_is_refused() -> None:
    both = ["plan", "--recipe", str(RECIPES / "gpt.toml"), "--model", "gpt3-175b", "--cluster", "dgx-a100"]
    result = CliRunner().invoke(app, both)
    assert result.exit_code == 2 and "leave one out" in result.output
