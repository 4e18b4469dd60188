"""What can be said of a recipe only with its model and data at hand: both are made, and held against the split.

The model is made of fake tensors (torch's FakeTensorMode), so it costs no memory; the data is made really.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from netfold.train.datasets import DATASETS, make_data
from netfold.train.examples import BadExampleError, Batch, Data
from netfold.train.model import Model
from netfold.train.models import MODELS, make_model
from netfold.train.parallel import embeddings, tensor
from netfold.train.parallel.batch_norm import norms_of
from netfold.train.parallel.pipeline_plan import check_chain
from netfold.train.recipe import Factory, Recipe
from netfold.train.recipe.errors import RecipeError, error_sentence, suggest
from netfold.train.recipe.index_tracking import IndexTracker
from netfold.train.recipe.registry import arguments, factory
from netfold.train.recipe.split import Split, split

Made = TypeVar("Made")
# In torch's warning of a target of another shape: the target's, then the output's.
_SHAPE = re.compile(r"torch\.Size\((\[[^]]*\])\)")
EXAMPLES_TRIED = 8
NUMBERS_TRIED = 1 << 21


@dataclass(frozen=True)
class ValidatedRecipe:
    """A recipe that nothing is known against."""

    split: Split
    model: Model
    """Of fake tensors of `fake`, where it could be made so."""
    fake: FakeTensorMode | None
    data: Data
    example: Batch
    """Of the training examples: two samples."""


def validate_recipe(recipe: Recipe, ranks: int) -> ValidatedRecipe:
    """Make what the recipe names, for so many ranks. Raises RecipeError with everything that is wrong."""
    problems = _backend(recipe.run.backend)
    shares = _collected(problems, lambda: split(recipe, ranks))
    model, fake = _collected(problems, lambda: _model(recipe.model)) or (None, None)
    data = _collected(problems, lambda: _made(make_data, recipe.data, "data"))
    example = _collected(problems, lambda: _example(recipe, data)) if data is not None else None
    if model is not None:
        problems += _parts(recipe, model)
    if model is not None and data is not None and example is not None:
        problems += _fit(recipe, model, fake, data, example)
    if problems or shares is None or model is None or data is None or example is None:
        raise RecipeError(problems)
    return ValidatedRecipe(shares, model, fake, data, example)


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
        raise RecipeError([f"{kind}.name {asked.name!r} cannot be made: {error_sentence(error)}"]) from error


def _backend(name: str) -> list[str]:
    if dist.is_backend_available(name.lower()):
        return []
    there = [each for each in dist.Backend.backend_list if each != "undefined" and dist.is_backend_available(each)]
    return [f"run.backend is {name!r}, which this torch has not; {suggest(name, there)}"]


def _example(recipe: Recipe, data: Data) -> Batch:
    name = recipe.data.name
    for which, examples in (("training", data.train), ("held-out", data.held_out)):
        if len(examples) == 0:
            raise RecipeError([f"data.name {name!r} has no {which} examples; look at its options"])
    # Where an unreadable one is left out, a later one may be read.
    tries = min(len(data.train), EXAMPLES_TRIED) if recipe.fault_tolerance.missing_data == "skip" else 1
    for index in range(tries):
        try:
            return data.train.batch([index, index], [0, 1])
        except Exception as error:
            if index + 1 < tries and isinstance(error, BadExampleError):
                continue
            raise RecipeError([f"data.name {name!r} cannot give an example: {error_sentence(error)}"]) from error
    raise AssertionError("there is at least one example")


def _fit(recipe: Recipe, model: Model, fake: FakeTensorMode | None, data: Data, example: Batch) -> list[str]:
    """Whether the model takes what the data gives, and its loss what comes out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # torch only warns of a target of another shape, and learns the wrong thing.
        warnings.filterwarnings("error", message="Using a target size")
        try:
            if fake is not None:
                try:
                    return _loss(recipe, _fake_loss(recipe, model, fake, _many(data, example)))
                except (ValueError, UserWarning):
                    raise
                except Exception:
                    # What fake tensors cannot do may still be right: the real ones decide.
                    pass
            real = make_model(recipe.model)
            return _loss(recipe, _computed(recipe, real, [*example.inputs, example.target]))
        except RecipeError as error:
            return list(error.problems)
        except Exception as error:
            names = f"model.name {recipe.model.name!r} does not take what data.name {recipe.data.name!r} gives"
            return [f"{_differing(recipe)}{names}: {_in_plain_words(error)}"]


def _in_plain_words(error: Exception) -> str:
    shapes = _SHAPE.findall(str(error)) if isinstance(error, UserWarning) else []
    if len(shapes) != 2:
        return error_sentence(error)
    target, output = shapes
    return f"the loss is given outputs of shape {output} and targets of shape {target}"


def _computed(recipe: Recipe, model: Model, numbers: Sequence[torch.Tensor]) -> torch.Tensor:
    """The loss of a batch (inputs, then the target). RecipeError where it cannot be cut as it will be."""
    ranks = recipe.parallel.tensor
    try:
        styles = tensor.styles_of(model, recipe.parallel)
    except ValueError:
        styles = {}  # `_parts` has said why
    with tensor.sequences_checked(model.module, styles, ranks):
        *inputs, target = numbers
        return model.loss(model.module(*inputs), target)


def _fake_loss(recipe: Recipe, model: Model, fake: FakeTensorMode, batch: Batch) -> torch.Tensor:
    real = [*batch.inputs, batch.target]
    with fake, IndexTracker(model.module) as followed:
        like = [torch.empty_like(each, device="cpu") for each in real]
        for each, value in zip(like, real, strict=True):
            followed.tell(each, value)
        return _computed(recipe, model, like)


def _many(data: Data, example: Batch) -> Batch:
    """Where a model looks up what the data gives: as many examples as are read in a moment, evenly spread."""
    numbers = sum(each[0].numel() for each in example.inputs if not each.is_floating_point())
    if numbers == 0:
        return example
    count = len(data.train)
    chosen = range(0, count, max(1, -(-count * numbers // NUMBERS_TRIED)))
    try:
        return data.train.batch(chosen, chosen)
    except BadExampleError:
        # What is done about it is for training to say (fault_tolerance.missing_data).
        return example


def _differing(recipe: Recipe) -> str:
    """Options that model and data both have, and not alike: what is asked of the one is often what the other lacks."""
    model, data = (
        arguments(factory(asked, known, kind))
        for asked, known, kind in ((recipe.model, MODELS, "model"), (recipe.data, DATASETS, "data"))
    )
    both = [name for name in model if name in data and model[name] != data[name]]
    return "".join(f"model.{name} is {model[name]!r}, but data.{name} is {data[name]!r}: " for name in both)


def _loss(recipe: Recipe, loss: torch.Tensor) -> list[str]:
    if loss.dim() == 0:
        return []
    shape = list(loss.shape)
    return [f"model.name {recipe.model.name!r} has a loss of shape {shape}; it must return the mean, one number"]


def _parts(recipe: Recipe, model: Model) -> list[str]:
    """Whether the model can be put together as the ranks will: each part says what it cannot do."""
    parallel, problems = recipe.parallel, []
    asked: list[Callable[[], object]] = [lambda: embeddings.embeddings_to_shard(model, recipe)]
    if parallel.tensor > 1:
        asked.append(lambda: tensor.styles_of(model, parallel))
    if parallel.pipeline > 1:
        asked.append(lambda: check_chain(model, parallel))
    if parallel.batch_norm > 1:
        asked.append(lambda: norms_of(model.module, parallel.batch_norm))
    for each in asked:
        try:
            each()
        except RecipeError:
            pass  # of the recipe alone: the split has said it
        except ValueError as error:
            problems.append(error_sentence(error))
    return problems
