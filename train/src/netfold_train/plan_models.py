"""Models for `netfold plan` from a recipe of `netfold train` and from a torch module: entry points netfold.models."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netfold.extras import need

if TYPE_CHECKING:
    from netfold_plan.model import ChainLayer, Model, Traced
    from netfold_train.dry_run.layers import Layer


def module_model(spec: str, inputs: Sequence[str]) -> Traced:
    """The model of `package.module:factory`, traced with inputs of these shapes.

    Raises ValueError, a line for each problem, if the module cannot be made or traced, or without torch or pydantic.
    """
    need("a module", ("torch", "pydantic"), "train")

    from netfold_train.dry_run import parse_input, parse_module, trace_module

    # As `python -m` does, so that a module in the working directory is found.
    sys.path.insert(0, "")
    return trace_module(parse_module(spec), [parse_input(each) for each in inputs], spec)


def recipe_model(path: Path, settings: Sequence[str]) -> tuple[Model, dict[str, Any]]:
    """The model of a recipe, and the job's keys in its file: batch, precision, optimizer, split.

    Raises ValueError, a line for each problem, if the recipe is invalid, or without torch or pydantic.
    """
    need("--recipe", ("torch", "pydantic"), "train")

    from netfold_plan.model import Chain
    from netfold_train.dry_run.layers import measure
    from netfold_train.dry_run.validate import validate_recipe
    from netfold_train.recipe.errors import RecipeError
    from netfold_train.recipe.load import load
    from netfold_train.recipe.split import ranks_asked

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
        raise ValueError(f"{path}: the activations of its layers are not known: {unknown}")
    item = 4 if precision == "f32" else 2
    links = tuple(_measured(layer, split.samples, item) for layer in layers)
    optimizer = {"sgd": "momentum", "lars": "momentum"}.get(recipe.optimizer.name, "adam")
    if optimizer == "momentum" and not recipe.optimizer.momentum:
        optimizer = "sgd"
    # netfold trains with DDP, which reduces gradients in f32 during the backward pass, and with torch's pipelines, in
    # which each rank of a stage sends the whole tensor.
    job = {"gpus": split.ranks, "batch": split.batch, "precision": precision, "optimizer": optimizer}
    job |= {"overlap": True, "gradient_bytes": 4, "scattered": False}
    parts = {"zero": recipe.parallel.zero, "pipeline": split.pipeline, "tensor": split.tensor}
    return Chain(recipe.model.name, links), {"job": job, "split": parts}


def _measured(layer: Layer, samples: int, item_bytes: int) -> ChainLayer:
    """A layer that was measured on fake tensors. Its arithmetic is spread over its matrices in proportion to size."""
    from netfold_plan.model import ChainLayer, Product

    matrices = [shape for shape in layer.weights if len(shape) > 1]
    elements = sum(math.prod(shape) for shape in matrices)
    # A third of the operations of forward and backward pass belongs to the forward pass.
    rows = layer.operations / 3 / samples / (2 * elements) if elements else 0.0
    products = tuple(Product(rows, shape[0], math.prod(shape[1:])) for shape in matrices if layer.operations)
    saved = (layer.saved_bytes or 0) / samples / item_bytes
    handed = sum(layer.handed_bytes) / samples / item_bytes
    return ChainLayer(layer.name, products, layer.parameters, saved, saved, handed, kernels=len(layer.weights) + 2)
