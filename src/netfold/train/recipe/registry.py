"""Find factories by netfold's names or "module:factory", and check their options against their signatures."""

from __future__ import annotations

import functools
import inspect
import json
import pkgutil
import typing
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from typing_extensions import NotRequired, Required, TypedDict

from netfold.extras import missing_extra
from netfold.plan.words import suggest
from netfold.train.recipe import Factory
from netfold.train.recipe.errors import RecipeError, validation_sentences


def factory(asked: Factory, known: Mapping[str, str], kind: str) -> Callable[..., Any]:
    """The callable that `asked` names, bound to its options as its annotations want them (text becomes a Path).

    kind: the recipe's table, "model" or "data". Raises RecipeError for an unknown name, and for every option that is
    unknown, missing, or of another type than its annotation.
    """
    found = _find(asked, known, kind)
    parameters = inspect.signature(found).parameters
    hints = _hints(found)
    named = {
        name: each for name, each in parameters.items() if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    }
    fields = {
        name: (Required if each.default is each.empty else NotRequired)[hints.get(name, Any)]
        for name, each in named.items()
    }
    open_ended = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    config = ConfigDict(extra="allow" if open_ended else "forbid", strict=True, arbitrary_types_allowed=True)
    adapter = TypeAdapter(with_config(config)(TypedDict("Options", fields)))  # type: ignore[operator]
    try:
        try:
            # Validated as JSON, a list may become a tuple and text a path, but no other type is converted.
            options = adapter.validate_json(json.dumps(asked.options))
        except TypeError:
            # A recipe that was made in Python may hold objects.
            options = adapter.validate_python(asked.options)
    except ValidationError as error:
        problems = validation_sentences(error, {(): (asked.name, list(named))})
        raise RecipeError([f"{kind}.{sentence}" for _, sentence in problems]) from None
    return functools.partial(found, **options)


def arguments(made: Callable[..., Any]) -> dict[str, Any]:
    """All arguments that a callable of `factory` will be called with, defaults too."""
    bound = inspect.signature(made).bind()
    bound.apply_defaults()
    return dict(bound.arguments)


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
