"""Factories by name: what netfold brings, and "module:factory" of one's own."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from netfold.train.recipe import Factory


def factory(asked: Factory, known: Mapping[str, str], kind: str) -> Callable[..., Any]:
    """The callable that `asked` names. ValueError says what there is, or which of its options is unknown."""
    place = known.get(asked.name, asked.name)
    if ":" not in place:
        raise ValueError(
            f"no {kind} is called {asked.name!r}: there is {', '.join(known)}, or a module:factory of yours"
        )
    module, _, name = place.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{kind} {asked.name!r}: {error}") from error
    try:
        inspect.signature(found).bind(**asked.options)
    except TypeError as error:
        raise ValueError(f"{kind} {asked.name!r}: {error}; it takes {inspect.signature(found)}") from error
    made: Callable[..., Any] = found
    return made
