"""Models that other rooms know, for the planner: the bench's by their layers, a recipe's as it would be trained."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from netfold.plan.model import Chain, Link, Model, Product
    from netfold.plan.model.catalogue import Layer

# Transformers have a kind of their own; of tables that are spread over ranks the bench's layers say nothing.
_OTHERWISE = ("bert-base", "bert-large", "dlrm")


def bench_models() -> tuple[str, ...]:
    from netfold.plan.model.catalogue import MODELS

    return tuple(name for name in MODELS if name not in _OTHERWISE)


def bench_model(name: str) -> Chain:
    """One of `bench_models`, a link a layer."""
    from netfold.plan.model import Chain
    from netfold.plan.model.catalogue import find_model

    return Chain(name, tuple(_link(layer) for layer in find_model(name).layers))


def recipe_model(path: Path, settings: Sequence[str]) -> tuple[Model, dict[str, Any]]:
    """The model of a recipe, and what its file says of a job: batch, precision, optimizer, split.

    Raises ValueError, a line a problem, where it is no recipe or cannot be trained; without torch and pydantic.
    """
    if any(importlib.util.find_spec(module) is None for module in ("torch", "pydantic")):
        raise ValueError("--recipe needs torch and pydantic: pip install 'netfold[train]'")

    from netfold.plan.model import Chain
    from netfold.train.explain.layers import measure
    from netfold.train.recipe.checked import check
    from netfold.train.recipe.load import load
    from netfold.train.recipe.problem import RecipeError
    from netfold.train.recipe.split import ranks_asked

    recipe, source = load(path, settings)
    try:
        checked = check(recipe, ranks_asked(recipe.parallel))
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
        # netfold trains by DDP: gradients in f32, beside the backward pass.
        "split": {"zero": recipe.parallel.zero, "pipeline": split.pipeline, "tensor": split.tensor},
    }
    said["job"] |= {"overlap": True, "gradient_bytes": 4}
    return Chain(recipe.model.name, links), said


def _link(layer: Layer) -> Link:
    from netfold.plan.model import Link, Product

    matrices = [shape for shape in layer.shapes if len(shape) > 1]
    products = tuple(
        Product(layer.flops / (2 * math.prod(shape)), shape[0], math.prod(shape[1:]))
        for shape in matrices
        if layer.flops
    )
    made = sum(product.rows * product.n for product in products)
    # Of norms, an addition and a multiplication an element; after a product comes an activation function, in place.
    changed = layer.flops / 2 if not matrices else made
    return Link(layer.name, products, sum(layer.counts), changed, changed, changed, frozen=layer.frozen)


def _measured(layer: Any, samples: int, item_bytes: int) -> Link:
    """A layer that was measured on fake tensors: its arithmetic is spread over its matrices by their size."""
    from netfold.plan.model import Link, Product

    matrices = [shape for shape in layer.weights if len(shape) > 1]
    elements = sum(math.prod(shape) for shape in matrices)
    # Of forward and backward pass together, a third is the forward pass.
    rows = layer.operations / 3 / samples / (2 * elements) if elements else 0.0
    products: tuple[Product, ...] = tuple(
        Product(rows, shape[0], math.prod(shape[1:])) for shape in matrices if layer.operations
    )
    kept = (layer.saved_bytes or 0) / samples / item_bytes
    handed = sum(layer.handed_bytes) / samples / item_bytes
    return Link(layer.name, products, layer.parameters, kept, kept, handed, kernels=len(layer.weights) + 2)
