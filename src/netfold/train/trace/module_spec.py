"""Modules and inputs as people write them: `package.module:factory:width=128`, `input_ids=8x128:int64`."""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from netfold.train.models import MODELS
from netfold.train.recipe import Factory
from netfold.train.recipe.errors import RecipeError, error_sentence
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
    """A module that cannot be traced as it was asked for; the message says why, and what to do."""


@dataclass(frozen=True)
class Input:
    """A tensor that the module is given: its first dimension is the sample. name: of a keyword argument, or ""."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    name: str = ""

    @property
    def text(self) -> str:
        return f"{self.name + '=' if self.name else ''}{'x'.join(map(str, self.shape))}:{str(self.dtype)[6:]}"


def parse_input(said: str) -> Input:
    """`32x3x224x224`, `8x128:int64`, `input_ids=8x128:int64`; raises TraceError for anything else."""
    found = _INPUT.fullmatch(said.strip())
    if found is None:
        raise TraceError(f"{said!r} is no input; write its shape, the samples first: 32x3x224x224, or 8x128:int64")
    dtype = found["dtype"] or "float32"
    if dtype not in DTYPES:
        near = difflib.get_close_matches(dtype, DTYPES, n=1, cutoff=0.5)
        meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(DTYPES)}"
        raise TraceError(f"{said!r}: there is no dtype {dtype!r}; {meant}")
    shape = tuple(map(int, found["shape"].split("x")))
    if 0 in shape:
        raise TraceError(f"{said!r} holds nothing: a dimension is 0; give each at least 1")
    return Input(shape, DTYPES[dtype], found["name"] or "")


def parse_module(said: str) -> Callable[[], Any]:
    """What makes it: `package.module:factory`, or a model of `netfold train` by its name; options after one more colon,
    `gpt:layers=12,width=768`. Raises TraceError, a line a problem, for names and options that there are not.
    """
    name, options = _parted(said)
    try:
        found = factory(Factory.model_validate({"name": name} | options), MODELS, "module")
    except RecipeError as error:
        raise TraceError(str(error)) from None
    return functools.partial(_called, found, said)


def _called(make: Callable[[], Any], said: str) -> Any:
    try:
        return make()
    except Exception as error:
        raise TraceError(f"{said} cannot be made of tensors without memory: {error_sentence(error)}") from error


def _parted(said: str) -> tuple[str, dict[str, Any]]:
    """The name, and options: behind the factory of a place, or right behind a name."""
    name, *rest = said.split(":")
    if rest and rest[0] and "=" not in rest[0]:
        name, rest = f"{name}:{rest[0]}", rest[1:]
    options: dict[str, Any] = {}
    for part in filter(None, (each.strip() for each in ":".join(rest).split(","))):
        key, equals, value = (each.strip() for each in part.partition("="))
        if not equals:
            raise TraceError(f"{said}: {part!r} says no value; write it as width=128")
        if key == "name":
            raise TraceError(f"{said}: an option that is called name cannot be given here; write a factory without it")
        options[key] = _value(value)
    return name, options


def _value(text: str) -> Any:
    """A number, true or false; else it is text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
