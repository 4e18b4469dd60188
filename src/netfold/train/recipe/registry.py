"""Factories by name: what netfold brings, and "module:factory" of one's own; their options held against signatures."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import typing
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from netfold.extras import missing_extra
from netfold.train.recipe import Factory
from netfold.train.recipe.errors import RecipeError, suggest
from netfold.train.recipe.messages import wanted


def factory(asked: Factory, known: Mapping[str, str], kind: str) -> Callable[..., Any]:
    """The callable that `asked` names, with its options, as its annotations want them (text for a Path): call it.

    `kind` is the recipe's table, "model" or "data". Raises RecipeError: a name that there is not, and every option
    that is unknown, missing, or of another type than the annotation says.
    """
    found = _find(asked, known, kind)
    parameters = inspect.signature(found).parameters
    hints = _hints(found)
    problems: list[str] = []
    options: dict[str, Any] = {}
    open_ended = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    names = [name for name, each in parameters.items() if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    for name, value in asked.options.items():
        if name not in names and not open_ended:
            there = suggest(name, names) if names else "it has none"
            problems.append(f"{kind}.{name} is not an option of {asked.name}; {there}")
            continue
        try:
            options[name] = _fitting(value, hints[name]) if name in hints else value
        except ValidationError as error:
            must = " or ".join(dict.fromkeys(wanted(each) for each in error.errors(include_url=False)))
            problems.append(f"{kind}.{name} is {value!r}; it must be {must}")
    problems += [
        f"{kind}.{name} is missing; {asked.name} has no default for it"
        for name in names
        if parameters[name].default is inspect.Parameter.empty and name not in asked.options
    ]
    if problems:
        raise RecipeError(problems)
    return functools.partial(found, **options)


def arguments(made: Callable[..., Any]) -> dict[str, Any]:
    """All that a callable of `factory` will be called with, defaults too."""
    bound = inspect.signature(made).bind()
    bound.apply_defaults()
    return dict(bound.arguments)


def _find(asked: Factory, known: Mapping[str, str], kind: str) -> Callable[..., Any]:
    place = known.get(asked.name, asked.name)
    if ":" not in place:
        raise RecipeError(
            [f"{kind}.name is {asked.name!r}; {suggest(asked.name, known)} (one of your own is written module:factory)"]
        )
    module, _, name = place.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        lacking = missing_extra(error, "train")
        if lacking is not None:
            raise RecipeError([f"{kind}.name is {asked.name!r}: {lacking}"]) from error
        raise RecipeError([f"{kind}.name is {asked.name!r}: {error}; it must be module:factory"]) from error
    if not callable(found):
        raise RecipeError([f"{kind}.name is {asked.name!r}, which is no function but {type(found).__name__}"])
    made: Callable[..., Any] = found
    return made


def _hints(found: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(found.__init__ if inspect.isclass(found) else found)
    except (NameError, TypeError):
        # Annotations that mean nothing at run time say nothing about options.
        return {}


def _fitting(value: Any, hint: Any) -> Any:
    try:
        adapter = TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError:
        adapter = TypeAdapter(hint)
    try:
        text = json.dumps(value)
    except TypeError:
        # An object, of a recipe made in Python.
        return adapter.validate_python(value, strict=True)
    # By way of JSON, a list may be a tuple and text a path, and yet nothing else is taken for what it is not.
    return adapter.validate_json(text, strict=True)
