"""Parse modules and inputs: `package.module:factory:width=128`, `input_ids=8x128:int64`."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from netfold.train.models import MODELS
from netfold.train.recipe import Factory
from netfold.train.recipe.errors import RecipeError, error_sentence, suggest
from netfold.train.recipe.registry import factory

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
    "int64": torch.int64,
    "int32": torch.int32,
    "bool": torch.bool,
}
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
    return Input(shape, DTYPES[dtype], found["name"] or "")


def parse_module(text: str) -> Callable[[], Any]:
    """The function that makes a module: `package.module:factory`, or the name of a model of `netfold train`.

    Options follow one more colon: `gpt:layers=12,width=768`. Raises TraceError, with one line for each unknown name or
    option.
    """
    name, options = _parse(text)
    try:
        found = factory(Factory.model_validate({"name": name} | options), MODELS, "module")
    except RecipeError as error:
        raise TraceError(str(error)) from None
    return functools.partial(_call, found, text)


def _call(make: Callable[[], Any], text: str) -> Any:
    try:
        return make()
    except Exception as error:
        raise TraceError(f"{text} cannot be made of fake tensors: {error_sentence(error)}") from error


def _parse(text: str) -> tuple[str, dict[str, Any]]:
    """(name, options): options follow "module:factory" or a name."""
    name, *rest = text.split(":")
    if rest and rest[0] and "=" not in rest[0]:
        name, rest = f"{name}:{rest[0]}", rest[1:]
    options: dict[str, Any] = {}
    for part in filter(None, (each.strip() for each in ":".join(rest).split(","))):
        key, equals, value = (each.strip() for each in part.partition("="))
        if not equals:
            raise TraceError(f"{text}: {part!r} has no value; write it as width=128")
        if key == "name":
            raise TraceError(f"{text}: an option called name cannot be given here; write a factory without it")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return name, options
