"""Find factories by netfold's names or "module:factory", and check their options against their signatures."""

from __future__ import annotations

import functools
import inspect
import json
import pkgutil
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from netfold.extras import missing_extra
from netfold_plan.words import suggest
from netfold_train.recipe import Factory
from netfold_train.recipe.errors import RecipeError, validation_sentences


def known(names: Literal["MODELS", "DATASETS"]) -> Mapping[str, str]:
    """netfold's own names and the factories' places."""
    # Not imported: training needs none of them.
    found: Mapping[str, str] = pkgutil.resolve_name(f"netfold_train.zoo:{names}")
    return found


def factory(asked: Factory, known: Mapping[str, str], kind: str) -> functools.partial[Any]:
    """The callable that `asked` names, as a partial of all its arguments, defaults too; text becomes a Path.

    kind: the recipe's table, "model" or "data". Raises RecipeError for an unknown name, and for every option that is
    unknown, missing, or of another type than its annotation.
    """
    found = _find(asked, known, kind)

    def bound(**options: Any) -> functools.partial[Any]:
        return functools.partial(found, **options)

    # pydantic checks arguments as this function's annotations want them, and adds the defaults.
    parameters, hints = inspect.signature(found).parameters, _hints(found)
    bound.__annotations__ = {name: hints.get(name, Any) for name in parameters}
    annotated = [each.replace(annotation=bound.__annotations__[name]) for name, each in parameters.items()]
    bound.__signature__ = inspect.Signature(annotated)  # type: ignore[attr-defined]
    config = ConfigDict(strict=True, arbitrary_types_allowed=True)
    adapter: TypeAdapter[functools.partial[Any]] = TypeAdapter(bound, config=config)  # type: ignore[arg-type]
    try:
        try:
            # Validated as JSON, a list may become a tuple and text a path, but no other type is converted.
            return adapter.validate_json(json.dumps(asked.options))
        except TypeError:
            # A recipe that was made in Python may hold objects.
            return adapter.validate_python(asked.options)
    except ValidationError as error:
        problems = validation_sentences(error, {(): (asked.name, list(parameters))})
        raise RecipeError([f"{kind}.{sentence}" for _, sentence in problems]) from None


def _find(asked: Factory, known: Mapping[str, str], kind: str) -> Callable[..., Any]:
    place = known.get(asked.name, asked.name)
    if ":" not in place:
        raise RecipeError(
            [f"{kind}.name is {asked.name!r}; {suggest(asked.name, known)} (your own: write module:factory)"]
        )
    try:
        found = pkgutil.resolve_name(place)
    except (ImportError, AttributeError) as error:
        problem = missing_extra(error, "train") or f"{error}; it must be module:factory"
        raise RecipeError([f"{kind}.name is {asked.name!r}: {problem}"]) from error
    if not callable(found):
        raise RecipeError([f"{kind}.name is {asked.name!r}, which is {type(found).__name__} and not a function"])
    made: Callable[..., Any] = found
    return made


def _hints(found: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(found.__init__ if inspect.isclass(found) else found, include_extras=True)
    except (NameError, TypeError):
        # Annotations that have no meaning at run time do not restrict options.
        return {}
