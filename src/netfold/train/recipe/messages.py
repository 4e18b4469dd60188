"""pydantic's findings about a recipe, as sentences for the one who wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from netfold.plan.request.key_lines import Key
from netfold.train.recipe import Recipe
from netfold.train.recipe.errors import suggest

_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text, in quotes",
    "path_type": "a path, in quotes",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
}
_BOUNDS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def sentences(error: ValidationError) -> list[tuple[Key, str]]:
    """One (key, sentence) for each key that is wrong, in the order of the recipe."""
    found: dict[Key, list[ErrorDetails]] = {}
    for each in error.errors(include_url=False):
        found.setdefault(_key(each["loc"]), []).append(each)
    return [(key, _sentence(key, details)) for key, details in found.items()]


def _key(place: tuple[int | str, ...]) -> Key:
    """Without the choice of a union that pydantic was trying, and without places in a list."""
    key: list[str] = []
    section: Any = Recipe
    for part in place:
        if not isinstance(part, str) or section is None:
            break
        key.append(part)
        section = _section(section, part)
    return tuple(key)


def _section(section: type[BaseModel], name: str) -> type[BaseModel] | None:
    """The section that a key of a section is; None where it is a value, or no key at all."""
    found = section.model_fields.get(name)
    kinds = () if found is None else (found.annotation, *get_args(found.annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _sentence(key: Key, details: list[ErrorDetails]) -> str:
    name, first = ".".join(key), details[0]
    if first["type"] == "extra_forbidden":
        known = _known(key[:-1])
        where = f"[{'.'.join(key[:-1])}]" if len(key) > 1 else "a recipe"
        return f"{name} is not a key of {where}; {suggest(key[-1], known)}"
    if first["type"] == "missing":
        if len(first["loc"]) == len(key):
            return f"{name} is missing; a recipe must have it"
        return f"{name} is {_shown(first['input'])}, which is too short; see its default"
    if first["type"] == "value_error":
        # A sentence of recipe.py's; one about several sections names its keys itself.
        return f"{name}: {first['ctx']['error']}" if name else str(first["ctx"]["error"])
    # One sentence for all choices of a union, none of which fitted.
    must = " or ".join(dict.fromkeys(wanted(each) for each in details))
    hint = ""
    if any(each["type"] == "literal_error" for each in details) and isinstance(first["input"], str):
        guess = suggest(first["input"], [word.strip("'") for each in details for word in _choices(each)])
        hint = f"; {guess}" if guess.startswith("did") else ""
    return f"{name} is {_shown(first['input'])}; it must be {must}{hint}"


def wanted(details: ErrorDetails) -> str:
    """What a value must be: "a whole number", "more than 0"."""
    kind, context = details["type"], details.get("ctx", {})
    if kind in _BOUNDS:
        bound, words = _BOUNDS[kind]
        return f"{words} {context[bound]:g}"
    if kind == "literal_error":
        choices = _choices(details)
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    if kind == "too_long":
        return f"a list of {context['max_length']}"
    # A kind that is not known here still has pydantic's own words.
    return _KINDS.get(kind) or details["msg"].removeprefix("Input should be ")


def _choices(details: ErrorDetails) -> list[str]:
    text = str(details.get("ctx", {}).get("expected", ""))
    return text.replace(" or ", ", ").split(", ") if details["type"] == "literal_error" else []


def _known(section: Key) -> list[str]:
    found: type[BaseModel] | None = Recipe
    for part in section:
        found = _section(found, part) if found is not None else None
    return list(found.model_fields) if found is not None else []


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return "a table"
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
