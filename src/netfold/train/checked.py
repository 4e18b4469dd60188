"""What can be said of a recipe only with its model and data at hand: both are made, and held against the split.

The model is made of fake tensors (torch's FakeTensorMode), so it costs no memory; the data is made really.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from netfold.train.datasets import DATASETS, make_data
from netfold.train.examples import Batch, Data, UnreadableError
from netfold.train.model import Chain, Model
from netfold.train.models import MODELS, make_model
from netfold.train.named import arguments, factory
from netfold.train.problem import RecipeError, in_a_sentence, meant
from netfold.train.recipe import Factory, Recipe
from netfold.train.split import Split, split, stages

Made = TypeVar("Made")
EXAMPLES_TRIED = 8


@dataclass(frozen=True)
class Checked:
    """A recipe that nothing is known against."""

    split: Split
    model: Model
    """Of fake tensors of `fake`, where it could be made so."""
    fake: FakeTensorMode | None
    data: Data
    example: Batch
    """Of the training examples: two samples."""


def check(recipe: Recipe, ranks: int) -> Checked:
    """Make what the recipe names, for so many ranks. Raises RecipeError with everything that is wrong."""
    problems = _backend(recipe.run.backend)
    shares = _collected(problems, lambda: split(recipe, ranks))
    model, fake = _collected(problems, lambda: _model(recipe.model)) or (None, None)
    data = _collected(problems, lambda: _made(make_data, recipe.data, "data"))
    example = _collected(problems, lambda: _example(recipe, data)) if data is not None else None
    if model is not None:
        problems += _stages(recipe, model) + _tensor(recipe, model)
    if model is not None and example is not None:
        problems += _fit(recipe, model, fake, example)
    if problems or shares is None or model is None or data is None or example is None:
        raise RecipeError(problems)
    return Checked(shares, model, fake, data, example)


def _collected(problems: list[str], make: Callable[[], Made]) -> Made | None:
    try:
        return make()
    except RecipeError as error:
        problems += error.problems
        return None


def _model(asked: Factory) -> tuple[Model, FakeTensorMode | None]:
    # What is wrong with name and options is said here, once.
    factory(asked, MODELS, "model")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with mode:
            return make_model(asked), mode
    except Exception:
        # It may want real numbers (a file of weights); and if it is wrong, then of real ones too, in plainer words.
        return _made(make_model, asked, "model"), None


def _made(make: Callable[[Factory], Made], asked: Factory, kind: str) -> Made:
    known = MODELS if kind == "model" else DATASETS
    factory(asked, known, kind)
    try:
        return make(asked)
    except RecipeError:
        raise
    except Exception as error:
        raise RecipeError([f"{kind}.name {asked.name!r} cannot be made: {in_a_sentence(error)}"]) from error


def _backend(name: str) -> list[str]:
    if dist.is_backend_available(name.lower()):
        return []
    there = [each for each in dist.Backend.backend_list if each != "undefined" and dist.is_backend_available(each)]
    return [f"run.backend is {name!r}, which this torch has not; {meant(name, there)}"]


def _example(recipe: Recipe, data: Data) -> Batch:
    name = recipe.data.name
    for which, examples in (("training", data.train), ("held-out", data.held_out)):
        if len(examples) == 0:
            raise RecipeError([f"data.name {name!r} has no {which} examples; look at its options"])
    # Where an unreadable one is left out, a later one may be read.
    tries = min(len(data.train), EXAMPLES_TRIED) if recipe.survive.missing_data == "skip" else 1
    for index in range(tries):
        try:
            return data.train.batch([index, index], [0, 1])
        except Exception as error:
            if index + 1 < tries and isinstance(error, UnreadableError):
                continue
            raise RecipeError([f"data.name {name!r} cannot give an example: {in_a_sentence(error)}"]) from error
    raise AssertionError("there is at least one example")


def _fit(recipe: Recipe, model: Model, fake: FakeTensorMode | None, example: Batch) -> list[str]:
    """Whether the model takes what the data gives, and its loss what comes out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # torch only warns of a target of another shape, and learns the wrong thing.
        warnings.filterwarnings("error", message="Using a target size")
        if fake is not None:
            with contextlib.suppress(Exception), fake:
                like = [torch.empty_like(each) for each in (*example.inputs, example.target)]
                return _loss(recipe, model.loss(model.module(*like[:-1]), like[-1]))
        # What fake tensors cannot do may still be right: the real ones decide.
        real = make_model(recipe.model)
        try:
            return _loss(recipe, real.loss(real.module(*example.inputs), example.target))
        except Exception as error:
            names = f"model.name {recipe.model.name!r} does not take what data.name {recipe.data.name!r} gives"
            return [f"{names}: {in_a_sentence(error)}"]


def _loss(recipe: Recipe, loss: torch.Tensor) -> list[str]:
    if loss.dim() == 0:
        return []
    shape = list(loss.shape)
    return [f"model.name {recipe.model.name!r} has a loss of shape {shape}; it must return the mean, one number"]


def _stages(recipe: Recipe, model: Model) -> list[str]:
    parallel, wanted = recipe.parallel, stages(recipe.parallel)
    if wanted == 1:
        return []
    if not isinstance(model.module, Chain):
        return [
            f"parallel.pipeline is {parallel.pipeline}, but model {recipe.model.name!r} is no netfold.train.Chain, so "
            "it cannot be cut into stages; 1 would do"
        ]
    if len(model.module) >= wanted:
        return []
    several = f" x parallel.interleave {parallel.interleave}" if wanted > parallel.pipeline else ""
    return [
        f"parallel.pipeline {parallel.pipeline}{several} makes {wanted} stages, but model {recipe.model.name!r} has "
        f"{len(model.module)} layers; take fewer stages, or a deeper model"
    ]


def _tensor(recipe: Recipe, model: Model) -> list[str]:
    parallel, name, tensor = recipe.parallel, recipe.model.name, recipe.parallel.tensor
    if tensor == 1:
        return []
    if model.tensor_plan is None:
        return [
            f"parallel.tensor is {tensor}, but model {name!r} does not say how its layers are cut (it has no "
            "tensor_plan); 1 would do"
        ]
    heads = arguments(factory(recipe.model, MODELS, "model")).get("heads")
    if isinstance(heads, int) and heads % tensor:
        would = [str(each) for each in range(1, heads + 1) if heads % each == 0]
        return [f"parallel.tensor is {tensor}, which does not divide model.heads {heads}; {_or(would)} would do"]
    try:
        plan = model.tensor_plan(parallel.style, parallel.sequence)
    except ValueError as error:
        return [in_a_sentence(error)]
    return _cuts(model, plan, tensor, name)


def _cuts(model: Model, plan: Any, tensor: int, name: str) -> list[str]:
    """Layers of the plan whose cut sides do not divide."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    problems = []
    for path, style in plan.items():
        try:
            layer = model.module.get_submodule(path)
        except AttributeError:
            continue  # a pattern, which parallelize_module knows
        side = "out_features" if isinstance(style, ColwiseParallel) else "in_features"
        width = getattr(layer, side, None) if isinstance(style, ColwiseParallel | RowwiseParallel) else None
        if isinstance(width, int) and width % tensor:
            problems.append(
                f"parallel.tensor is {tensor}, which does not divide the {width} {side} of {path} in {name}; "
                "choose the model's widths so that it does"
            )
    return problems[:1]


def _or(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
