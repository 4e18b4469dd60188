"""Every recipe of netfold-train: its model and data can be made, and a short run beats the weak baseline."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from training import changed, trained

from netfold_train import Recipe
from netfold_train.recipe.registry import factory
from netfold_train.recipe.split import ranks_asked
from netfold_train.zoo import DATASETS, MODELS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RECIPES = Path(__file__).parents[3] / "train/src/netfold_train/recipes"
# Steps of a shorter run, and by how much its metric must beat the weak baseline, in the metric's unit. The whole run's
# result is in lab/bench/results/recipes.md.
RUNS = {
    "bert": (2000, 0.05),
    "bert-classes": (500, 0.02),
    "dlrm": (1150, 0.03),
    "edsr": (150, 0.4),
    "edsr-large": (80, 0.2),
    "gpt": (100, 0.15),
    "gpt-3d": (100, 0.15),
    "gpt-diloco": (400, 0.1),
    "gpt-tensor": (100, 0.15),
    "gpt-zero3": (100, 0.15),
    "resnet18": (200, 0.1),
    "resnet18-lars": (40, 0.02),
    "resnet50": (120, 0.03),
}


def test_every_recipe_has_a_run() -> None:
    assert sorted(path.stem for path in RECIPES.glob("*.toml")) == sorted(RUNS)


def read(name: str) -> dict[str, Any]:
    return tomllib.loads((RECIPES / f"{name}.toml").read_text())


@pytest.mark.parametrize("name", RUNS)
def test_the_options_of_a_recipe_fit_its_model_and_its_data(name: str) -> None:
    recipe = Recipe.model_validate(read(name))
    factory(recipe.model, MODELS, "model")
    factory(recipe.data, DATASETS, "data")
    assert recipe.training.batch % (recipe.parallel.data or 1) == 0
    for shared in {"context", "scale", "vocabulary"} & set(recipe.data.options):
        of_model, of_data = recipe.model.options.get(shared), recipe.data.options.get(shared)
        assert of_model == of_data, f"{shared}: the model's is {of_model}, the data's is {of_data}"


@pytest.mark.soak
@pytest.mark.parametrize("name", RUNS)
def test_a_short_run_of_a_recipe_beats_its_weak_baseline(name: str) -> None:
    from netfold_train.data import make_data

    steps, margin = RUNS[name]
    table = changed(read(name), training={"steps": steps})
    recipe = Recipe.model_validate(table)
    metric = make_data(recipe.data).metric
    (outcomes,) = trained([table], ranks_asked(recipe.parallel), timeout_s=1500)
    assert all(each == outcomes[0] for each in outcomes)
    value = outcomes[0].metric
    gain = (value - metric.baseline) * (1 if metric.better == "higher" else -1)
    assert gain > margin, f"{name}: {metric.name} {value:.4f}, {metric.baseline_is} {metric.baseline:.4f}"
