"""Parse modules and inputs: `package.module:factory:width=128`, `input_ids=8x128:int64`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from netfold_plan.words import suggest
from netfold_train.recipe import Factory
from netfold_train.recipe.errors import RecipeError
from netfold_train.recipe.registry import factory
from netfold_train.zoo import MODELS

DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "bool")
# Between two options, and not inside a list.
_COMMA = re.compile(r",(?![^\[]*\])")
_INPUT = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<shape>\d+(?:x\d+)*)(?::(?P<dtype>\w+))?")


class TraceError(ValueError):
    """A module that cannot be traced; the message says why, and what to do."""


@dataclass(frozen=True)
class Input:
    """An input tensor. The first dimension is the sample. name: of the keyword argument, or "" if positional."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    name: str = ""

    @property
    def text(self) -> str:
        return f"{self.name + '=' if self.name else ''}{'x'.join(map(str, self.shape))}:{str(self.dtype)[6:]}"


def parse_input(text: str) -> Input:
    """Parse `32x3x224x224`, `8x128:int64` or `input_ids=8x128:int64`; raise TraceError for any other text."""
    found = _INPUT.fullmatch(text.strip())
    if found is None:
        raise TraceError(f"{text!r} is not an input; write its shape, samples first: 32x3x224x224, or 8x128:int64")
    dtype = found["dtype"] or "float32"
    if dtype not in DTYPES:
        raise TraceError(f"{text!r}: there is no dtype {dtype!r}; {suggest(dtype, DTYPES)}")
    shape = tuple(map(int, found["shape"].split("x")))
    if 0 in shape:
        raise TraceError(f"{text!r} is empty: a dimension is 0; give each at least 1")
    return Input(shape, getattr(torch, dtype), found["name"] or "")


def parse_module(text: str) -> Callable[[], Any]:
    """The function that makes a module: `package.module:factory`, or the name of a model of `netfold train`.

    Options follow one more colon: `gpt:layers=12,width=768`, `linear-stack:widths=[64,10]`. Raises TraceError, with one
    line for each unknown name or option.
    """
    name, *rest = text.split(":")
    if rest and rest[0] and "=" not in rest[0]:
        name = f"{name}:{rest.pop(0)}"
    options: dict[str, Any] = {}
    for part in filter(None, (each.strip() for each in _COMMA.split(":".join(rest)))):
        key, equals, value = (each.strip() for each in part.partition("="))
        if not equals or key == "name":
            raise TraceError(f"{text}: {part!r} has no value, or sets the factory's name; write width=128")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    try:
        return factory(Factory.model_validate({"name": name} | options), MODELS, "module")
    except RecipeError as error:
        raise TraceError(str(error)) from None
