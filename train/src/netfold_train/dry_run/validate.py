"""Check a recipe by making its model and its data, and checking both against the split.

The model is made of fake tensors (torch's FakeTensorMode), which need no memory; the data is real.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from netfold_plan.words import suggest
from netfold_train.checkpoint.initial import check_initial
from netfold_train.checkpoint.state import model_tensors
from netfold_train.data import make_data
from netfold_train.data.examples import BadExampleError, Batch, Data
from netfold_train.models import make_model
from netfold_train.models.model import Model
from netfold_train.parallel import tensor
from netfold_train.parallel.batch_norm import norms_of
from netfold_train.parallel.context import check_context, check_tokens
from netfold_train.parallel.device import CPU
from netfold_train.parallel.owned import owned_modules
from netfold_train.parallel.pipeline_plan import check_chain
from netfold_train.recipe import Recipe
from netfold_train.recipe.errors import RecipeError, error_sentence
from netfold_train.recipe.registry import factory
from netfold_train.recipe.split import Split, split
from netfold_train.zoo import DATASETS, MODELS

Made = TypeVar("Made")
EXAMPLES_TRIED = 8
NUMBERS_TRIED = 1 << 21


@dataclass(frozen=True)
class ValidatedRecipe:
    """A recipe that has passed all checks."""

    split: Split
    model: Model
    """Of fake tensors of `fake`, or of real tensors if `fake` is None."""
    fake: FakeTensorMode | None
    data: Data
    example: Batch
    """Two samples of the training examples."""


def validate_recipe(recipe: Recipe, ranks: int) -> ValidatedRecipe:
    """Make the recipe's model and data, for `ranks` ranks. Raises RecipeError with all problems."""
    model_is, data_is = f"model.name {recipe.model.name!r}", f"data.name {recipe.data.name!r}"
    problems = Problems()
    problems.collect("", lambda: _check_backend(recipe.run.backend))
    shares = problems.collect("", lambda: split(recipe, ranks))
    model, fake = problems.collect(f"{model_is} cannot be made: ", lambda: _model(recipe)) or (None, None)
    data = problems.collect(f"{data_is} cannot be made: ", lambda: make_data(recipe.data))
    example = None
    if data is not None:
        example = problems.collect(f"{data_is} cannot give an example: ", lambda: _example(recipe, data))
    if example is not None:
        problems.collect("", lambda: check_tokens(example, recipe.parallel.context))
    if model is not None and recipe.training.initial is not None:
        tensors = model_tensors([model.module], dict(model.module.named_parameters()))
        problems.collect("", lambda: check_initial(recipe.training, tensors))
    for check in _parallelism(recipe, model) if model is not None else ():
        problems.collect("", check)
    if model is not None and data is not None and example is not None:
        text = f"{_differing(recipe)}{model_is} does not fit {data_is}: "
        problems.collect(text, lambda: _check_loss(recipe, model, fake, data, example))
    if problems or shares is None or model is None or data is None or example is None:
        raise RecipeError(problems)
    return ValidatedRecipe(shares, model, fake, data, example)


class Problems(list[str]):
    def collect(self, text: str, make: Callable[[], Made]) -> Made | None:
        """Return the result of `make`, or add its error's sentence after `text` (a RecipeError has its own ones)."""
        try:
            return make()
        except RecipeError as error:
            self.extend(error.problems)
        except Exception as error:
            self.append(text + error_sentence(error))
        return None


def _check_backend(name: str) -> None:
    if not dist.is_backend_available(name.lower()):
        there = [each for each in dist.Backend.backend_list if each != "undefined" and dist.is_backend_available(each)]
        raise RecipeError([f"run.backend is {name!r}, which this torch lacks; {suggest(name, there)}"])


def _model(recipe: Recipe) -> tuple[Model, FakeTensorMode | None]:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with mode:
            return make_model(recipe.model), mode
    except RecipeError:
        raise
    except Exception:
        # The model may need real values (a file of weights). If the model is wrong, real tensors give a clearer error.
        return make_model(recipe.model), None


def _example(recipe: Recipe, data: Data) -> Batch:
    for which, examples in (("training", data.train), ("held-out", data.held_out)):
        if len(examples) == 0:
            raise RecipeError([f"data.name {recipe.data.name!r} has no {which} examples; look at its options"])
    # With "skip", training replaces an unreadable example, so a later one may serve.
    tries = min(len(data.train), EXAMPLES_TRIED) if recipe.fault_tolerance.missing_data == "skip" else 1
    for index in range(tries - 1):
        with contextlib.suppress(BadExampleError):
            return data.train.batch([index, index], [0, 1])
    return data.train.batch([tries - 1, tries - 1], [0, 1])


def _parallelism(recipe: Recipe, model: Model) -> Iterator[Callable[[], object]]:
    """Checks that raise ValueError if a kind of parallelism cannot be applied to the model."""
    parallel = recipe.parallel
    yield lambda: owned_modules(model, recipe)
    yield lambda: check_context(model, recipe)
    if parallel.tensor > 1:
        yield lambda: tensor.styles_of(model, parallel)
    if parallel.pipeline > 1:
        yield lambda: check_chain(model, parallel)
    if parallel.batch_norm > 1:
        yield lambda: norms_of(model.module, parallel.batch_norm)


def _check_loss(recipe: Recipe, model: Model, fake: FakeTensorMode | None, data: Data, example: Batch) -> None:
    """Raise an error unless the model accepts the data's inputs, and has losses for each sample."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # torch only warns about a target of another shape, and trains on broadcast values.
        warnings.filterwarnings("error", message="Using a target size")
        _try_loss(recipe, model, fake, data, example)


def _try_loss(recipe: Recipe, model: Model, fake: FakeTensorMode | None, data: Data, example: Batch) -> None:
    if fake is not None:
        batch = _many(data, example).to(CPU)
        try:
            with fake:
                like = [torch.empty_like(each) if each.is_floating_point() else each for each in batch.tensors]
                with IndexCheck(model.module):
                    return _compute(recipe, model, batch.like(like))
        except (ValueError, UserWarning):
            raise
        except Exception:
            # An operation that fake tensors do not support may be correct: real tensors decide.
            pass
    _compute(recipe, make_model(recipe.model), example)


def _compute(recipe: Recipe, model: Model, batch: Batch) -> None:
    """Compute the losses of a batch. Raises RecipeError if sequences cannot be cut as planned."""
    with contextlib.suppress(ValueError):  # `_parallelism` reports this.
        styles = tensor.styles_of(model, recipe.parallel)
        tensor.check_sequences(model.module, styles, recipe.parallel.tensor)
    model.losses(model.module(*batch.inputs, **batch.named), batch.target)


def _many(data: Data, example: Batch) -> Batch:
    """For data with indices: a larger batch of evenly chosen examples, up to NUMBERS_TRIED numbers."""
    numbers = sum(each[0].numel() for each in example.tensors[:-1] if not each.is_floating_point())
    if numbers == 0:
        return example
    count = len(data.train)
    chosen = range(0, count, max(1, -(-count * numbers // NUMBERS_TRIED)))
    try:
        return data.train.batch(chosen, chosen)
    except BadExampleError:
        # Training handles unreadable examples (fault_tolerance.missing_data).
        return example


def _differing(recipe: Recipe) -> str:
    """The options of model and data with equal names and different values, which are often the cause of an error."""
    model, data = (
        factory(asked, known, kind).keywords
        for asked, known, kind in ((recipe.model, MODELS, "model"), (recipe.data, DATASETS, "data"))
    )
    both = [name for name in model if name in data and model[name] != data[name]]
    return "".join(f"model.{name} is {model[name]!r}, but data.{name} is {data[name]!r}: " for name in both)


class IndexCheck(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Check integers in a pass of fake tensors; enter it inside the fake mode, and give the pass real integers.

    A fake tensor has no values, so a table with too few rows would pass unnoticed. Integers that are computed only from
    real integers stay real. Raises ValueError for a row that a table lacks, and for a class beyond the last one.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in ("embedding", "_embedding_bag"):
            _check_numbers(args[1], args[0].shape[0], self._names.get(id(args[0]), "a table"), "rows")
        elif name in ("nll_loss_forward", "nll_loss2d_forward"):
            _check_numbers(args[1], args[0].shape[1 if args[0].ndim > 1 else 0], "the loss", "classes", args[4])
        result = func(*args, **kwargs)
        whole = isinstance(result, Tensor) and not result.is_floating_point() and not result.is_complex()
        drawn = torch.Tag.nondeterministic_seeded in func.tags or "empty" in name or func._schema.is_mutable
        if whole and not drawn and not any(isinstance(each, FakeTensor) for each in tree_leaves((args, kwargs))):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        return result


def _check_numbers(asked: Tensor, count: int, where: str, what: str, ignored: int | None = None) -> None:
    if isinstance(asked, FakeTensor):
        return
    with unset_fake_temporarily():
        beyond = (asked < 0) | (asked >= count)
        wrong = asked[beyond if ignored is None else beyond & (asked != ignored)]
        worst = int(wrong.max()) if wrong.numel() else None
    if worst is not None:
        raise ValueError(f"{where} has {count} {what}, and number {worst} is used")
