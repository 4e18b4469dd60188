"""Every recipe in examples/recipes: its model and data can be made, and a minute of training beats the baseline."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from training import trained

from netfold.train import Recipe
from netfold.train.data import DATASETS
from netfold.train.models import MODELS
from netfold.train.recipe.registry import factory

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RECIPES = Path(__file__).parents[2] / "examples" / "recipes"
# By how much a recipe's metric must beat the baseline, in the metric's unit: well below the gain in
# docs/reference/train/models.md, and far above that of an untrained model.
MARGINS = {
    "bert": 0.05,
    "dlrm": 0.02,
    "edsr": 0.5,
    "edsr-large": 0.05,
    "gpt": 0.8,
    "resnet18": 0.15,
    "resnet50": 0.08,
}


def test_every_recipe_has_a_margin() -> None:
    assert sorted(path.stem for path in RECIPES.glob("*.toml")) == sorted(MARGINS)


def read(name: str) -> dict[str, Any]:
    return tomllib.loads((RECIPES / f"{name}.toml").read_text())


@pytest.mark.parametrize("name", MARGINS)
def test_the_options_of_a_recipe_fit_its_model_and_its_data(name: str) -> None:
    recipe = Recipe.model_validate(read(name))
    factory(recipe.model, MODELS, "model")
    factory(recipe.data, DATASETS, "data")
    assert recipe.training.batch % (recipe.parallel.data or 1) == 0
    for shared in ("context", "scale"):
        of_model, of_data = recipe.model.options.get(shared), recipe.data.options.get(shared)
        assert of_model == of_data, f"{shared}: the model's is {of_model}, the data's is {of_data}"


@pytest.mark.soak
@pytest.mark.parametrize("name", MARGINS)
def test_a_minute_of_a_recipe_beats_its_baseline(name: str) -> None:
    from netfold.train.data import make_data

    metric = make_data(Recipe.model_validate(read(name)).data).metric
    ((one, other),) = trained([read(name)], 2, timeout_s=1500)
    assert one == other
    gain = (one.metric - metric.baseline) * (1 if metric.better == "higher" else -1)
    assert gain > MARGINS[name], f"{name}: {metric.name} {one.metric:.4f}, {metric.baseline_is} {metric.baseline:.4f}"
