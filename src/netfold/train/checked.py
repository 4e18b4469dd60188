"""What can be said of a recipe only with its model and data at hand: both are made, and held against the split.

The model is made of fake tensors (torch's FakeTensorMode), so it costs no memory; the data is made really.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from netfold.train.datasets import DATASETS, make_data
from netfold.train.examples import Data
from netfold.train.model import Chain, Model
from netfold.train.models import MODELS, make_model
from netfold.train.named import arguments, factory
from netfold.train.problem import RecipeError, meant
from netfold.train.recipe import Factory, Recipe
from netfold.train.split import Split, split, stages

Made = TypeVar("Made")


@dataclass(frozen=True)
class Checked:
    """A recipe that nothing is known against."""

    split: Split
    model: Model
    """Of fake tensors of `fake`, where it could be made so."""
    fake: FakeTensorMode | None
    data: Data


def check(recipe: Recipe, ranks: int) -> Checked:
    """Make what the recipe names, for so many ranks. Raises RecipeError with everything that is wrong."""
    problems = _backend(recipe.run.backend)
    shares = _collected(problems, lambda: split(recipe, ranks))
    model, fake = _collected(problems, lambda: _model(recipe.model)) or (None, None)
    data = _collected(problems, lambda: _made(make_data, recipe.data, "data"))
    if data is not None:
        problems += _data(recipe.data, data)
    if model is not None:
        problems += _stages(recipe, model) + _tensor(recipe, model)
    if problems or shares is None or model is None or data is None:
        raise RecipeError(problems)
    return Checked(shares, model, fake, data)


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


def in_a_sentence(error: BaseException) -> str:
    """What was raised: ours as it is, as a person's words; others with their type, and the line that raised them."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, ValueError) and text:
        return text
    last = traceback.extract_tb(error.__traceback__)
    where = f" ({last[-1].filename}:{last[-1].lineno})" if last else ""
    return f"{type(error).__name__}{': ' if text else ''}{text}{where}"


def _backend(name: str) -> list[str]:
    if dist.is_backend_available(name.lower()):
        return []
    there = [each for each in dist.Backend.backend_list if each != "undefined" and dist.is_backend_available(each)]
    return [f"run.backend is {name!r}, which this torch has not; {meant(name, there)}"]


def _data(asked: Factory, data: Data) -> list[str]:
    return [
        f"data.name {asked.name!r} has no {which} examples; look at its options"
        for which, examples in (("training", data.train), ("held-out", data.held_out))
        if len(examples) == 0
    ]


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
    return _cuts(model, model.tensor_plan(parallel.style, parallel.sequence), tensor, name)


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
