"""Recipes as input of the planner."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from netfold.cli import app
from netfold_plan.model import Chain, ChainLayer, Product, ShardSpec
from netfold_train.plan_models import recipe_model

RECIPES = Path(__file__).parents[3] / "train/src/netfold_train/recipes"
CHAIN = Chain(
    "two",
    (
        ChainLayer("first", (Product(4.0, 8, 16),), 128, changed=32, kept=32, handed=32),
        ChainLayer("second", (Product(4.0, 2, 8),), 16, changed=8, kept=8, handed=8),
    ),
)


def test_a_chain_counts_products_of_trained_layers_three_times_and_of_frozen_layers_once() -> None:
    assert CHAIN.parameters == 144 and CHAIN.flops == 3 * 2 * (4 * 8 * 16 + 4 * 2 * 8)
    frozen = Chain("frozen", (ChainLayer("first", (Product(4.0, 8, 16),), 128, 32, 32, 32, frozen=True),))
    assert frozen.flops == 2 * 4 * 8 * 16


def test_activations_of_a_chain_grow_with_the_microbatch_and_recomputation_keeps_inputs() -> None:
    assert [layer.kept_bytes for layer in CHAIN.layers(ShardSpec(3))] == [3 * 32 * 2, 3 * 8 * 2]
    full = CHAIN.layers(ShardSpec(3, recomputation="full"))
    assert [layer.kept_bytes for layer in full] == [layer.input_bytes for layer in full] == [0, 3 * 32 * 2]
    assert all(layer.again == layer.forward for layer in full)


def test_a_chain_names_the_splits_it_lacks() -> None:
    with pytest.raises(ValueError, match="use tensor 1"):
        CHAIN.layers(ShardSpec(1, tensor=2))
    with pytest.raises(ValueError, match="for transformers"):
        CHAIN.layers(ShardSpec(1, recomputation="selective"))


@pytest.mark.torch
def test_a_recipe_becomes_a_model_and_a_job() -> None:
    model, said = recipe_model(RECIPES / "gpt.toml", ("training.batch=64",))
    assert isinstance(model, Chain) and model.parameters == 4_240_896
    assert said["job"]["batch"] == 64 and said["job"]["optimizer"] == "adam" and said["job"]["gpus"] == 2
    assert sum(link.kept for link in model.links) > 0 and model.flops > 0


@pytest.mark.torch
def test_an_invalid_recipe_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text((RECIPES / "gpt.toml").read_text().replace("batch = 16", "batsh = 16"))
    result = CliRunner().invoke(app, ["plan", "--recipe", str(file), "--cluster", "dgx-a100"])
    assert result.exit_code == 2 and "did you mean batch?" in result.output and "mine.toml:16" in result.output


def test_a_recipe_beside_a_model_is_refused() -> None:
    both = ["plan", "--recipe", str(RECIPES / "gpt.toml"), "--model", "gpt3-175b", "--cluster", "dgx-a100"]
    result = CliRunner().invoke(app, both)
    assert result.exit_code == 2 and "leave one out" in result.output
