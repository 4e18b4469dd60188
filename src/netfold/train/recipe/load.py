"""From a file and settings to a recipe, or to sentences that say which key on which line is wrong, and what would do.

What is found here needs neither torch nor the model nor the data; `checked` asks those.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from netfold.plan.request.key_lines import Key, key_lines
from netfold.train.recipe import Recipe, shipped
from netfold.train.recipe.errors import RecipeError, Source
from netfold.train.recipe.messages import sentences

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Tree = dict[str, Any]

_AT = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")
_SETTING = re.compile(r"\s*([A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)+)\s*=(.*)", re.DOTALL)


def load(file: Path, settings: Sequence[str] = ()) -> tuple[Recipe, Source]:
    """The recipe in `file`, with `settings` ("parallel.pipeline=4") laid over it, and where its keys were written.

    `file` may be the name of a shipped recipe. A run without a name gets the file's. Raises RecipeError, which lists
    everything that is wrong.
    """
    file = shipped.find(file)
    text = _text(file)
    try:
        tree = tomllib.loads(text)
    except RecursionError:
        raise RecipeError([f"{file}: lists or tables lie inside each other too deeply to be read"]) from None
    except ValueError as error:  # TOMLDecodeError is one; a number of thousands of digits is another
        raise RecipeError([_not_toml(file, text, str(error))]) from None
    said: dict[Key, str] = {}
    for setting in settings:
        said[_lay_over(tree, setting)] = setting
    source = Source(file, key_lines(text), said)
    try:
        # A date becomes text: JSON, as which the recipe reaches the ranks, has none.
        recipe = Recipe.model_validate(json.loads(json.dumps(tree, default=str)))
    except ValidationError as error:
        raise RecipeError([source.place(words, key or None) + words for key, words in sentences(error)]) from None
    if recipe.run.name is None:
        recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"name": file.stem})})
    return recipe, source


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = sorted(str(path) for path in file.parent.glob("*.toml"))
        there = f"in that folder there is {', '.join(near)}" if near else "give the path of a recipe, a TOML file"
        ours = "" if near else f", or the name of one that comes with netfold: {', '.join(shipped.names())}"
        raise RecipeError([f"{file}: there is no such file; {there}{ours}"]) from None
    except OSError as error:
        raise RecipeError([f"{file}: cannot be read: {error.strerror}; give the path of a recipe"]) from None
    except UnicodeDecodeError as error:
        raise RecipeError([f"{file}: is not text in UTF-8 (byte {error.start}); save it as that"]) from None


def _not_toml(file: Path, text: str, said: str) -> str:
    at = _AT.search(said)
    reason = said[: at.start()] if at else said
    line = int(at[1]) if at and at[1] else len(text.splitlines())
    fix = {
        "Invalid value": "text needs quotes, and true and false are small",
        "Expected '=' after a key in a key/value pair": "a line is key = value, a table [name]",
        "Cannot overwrite a value": "a key may be given once",
    }.get(reason, "see toml.io for the format")
    if reason.startswith("Cannot declare"):
        reason, fix = "this table was begun above", "put its keys together"
    return f"{file}:{line}: this is not TOML: {reason[:1].lower()}{reason[1:]}; {fix}"


def _lay_over(tree: Tree, setting: str) -> Key:
    """Put one setting's value in the place of the file's; returns its key."""
    asked = _SETTING.fullmatch(setting)
    if asked is None:
        raise RecipeError([f"--set {setting}: this is no setting; write section.key=value, as parallel.pipeline=4"])
    key, value = tuple(asked[1].split(".")), asked[2].strip()
    table = tree
    for end, part in enumerate(key[:-1], 1):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise RecipeError([f"--set {setting}: {'.'.join(key[:end])} is a value, and has no keys"])
    if value:
        table[key[-1]] = _value(setting, value)
    else:
        # The way to go from steps to epochs: no value, no key.
        table.pop(key[-1], None)
    return key


def _value(setting: str, text: str) -> Any:
    try:
        read = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as error:
        if text[0] not in "[{\"'" and "\n" not in text:
            return text
        reason = _AT.sub("", str(error))
        raise RecipeError([f"--set {setting}: its value is not TOML: {reason[:1].lower()}{reason[1:]}"]) from None
    if len(read) > 1:
        raise RecipeError([f"--set {setting}: these are several; give each a --set of its own"])
    return read["value"]
