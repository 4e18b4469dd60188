"""A recipe of `netfold train` as the planner takes it: its model layer by layer, and what it says of a job."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netfold.extras import need

if TYPE_CHECKING:
    from netfold.plan.model import Link, Model
    from netfold.train.explain.layers import Layer


def recipe_model(path: Path, settings: Sequence[str]) -> tuple[Model, dict[str, Any]]:
    """The model of a recipe, and what its file says of a job: batch, precision, optimizer, split.

    Raises ValueError, a line a problem, where it is no recipe or cannot be trained; without torch and pydantic.
    """
    need("--recipe", ("torch", "pydantic"), "train")

    from netfold.plan.model import Chain
    from netfold.train.explain.layers import measure
    from netfold.train.recipe.errors import RecipeError
    from netfold.train.recipe.load import load
    from netfold.train.recipe.split import ranks_asked
    from netfold.train.recipe.validate import validate_recipe

    recipe, source = load(path, settings)
    try:
        checked = validate_recipe(recipe, ranks_asked(recipe.parallel))
    except ValueError as error:
        raise RecipeError(source.placed(error)) from None
    split, precision = checked.split, recipe.training.precision
    layers, unknown = measure(
        checked.model, checked.fake, checked.example, samples=split.samples, precision=precision, tensor=1
    )
    if unknown:
        raise ValueError(f"{path}: what its layers keep and hand on is not known: {unknown}")
    item = 4 if precision == "f32" else 2
    links = tuple(_measured(layer, split.samples, item) for layer in layers)
    optimizer = {"sgd": "momentum", "lars": "momentum"}.get(recipe.optimizer.name, "adam")
    if optimizer == "momentum" and not recipe.optimizer.momentum:
        optimizer = "sgd"
    said: dict[str, Any] = {
        "job": {"gpus": split.ranks, "batch": split.batch, "precision": precision, "optimizer": optimizer},
        # netfold trains by DDP: gradients in f32, beside the backward pass; and by torch's pipelines, which send all.
        "split": {"zero": recipe.parallel.zero, "pipeline": split.pipeline, "tensor": split.tensor},
    }
    said["job"] |= {"overlap": True, "gradient_bytes": 4, "scattered": False}
    return Chain(recipe.model.name, links), said


def _measured(layer: Layer, samples: int, item_bytes: int) -> Link:
    """A layer that was measured on fake tensors: its arithmetic is spread over its matrices by their size."""
    from netfold.plan.model import Link, Product

    matrices = [shape for shape in layer.weights if len(shape) > 1]
    elements = sum(math.prod(shape) for shape in matrices)
    # Of forward and backward pass together, a third is the forward pass.
    rows = layer.operations / 3 / samples / (2 * elements) if elements else 0.0
    products = tuple(Product(rows, shape[0], math.prod(shape[1:])) for shape in matrices if layer.operations)
    kept = (layer.saved_bytes or 0) / samples / item_bytes
    handed = sum(layer.handed_bytes) / samples / item_bytes
    return Link(layer.name, products, layer.parameters, kept, kept, handed, kernels=len(layer.weights) + 2)
