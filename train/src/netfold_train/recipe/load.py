"""Read a recipe from a file and settings, or raise sentences that name each wrong key, its line, and a correction.

These checks need no torch, model or data; `dry_run/validate.py` makes the checks that do.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from netfold_plan.request.key_lines import Key, key_lines
from netfold_plan.toml_file import read_toml, reason
from netfold_train.recipe import Recipe
from netfold_train.recipe.errors import RecipeError, Source, validation_sentences
from netfold_train.runs import RECIPE

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_SETTING = re.compile(r"\s*([A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)+)\s*=(.*)", re.DOTALL)


def load(file: Path, settings: Sequence[str] = ()) -> tuple[Recipe, Source]:
    """Read the recipe in `file`, override it with `settings` ("parallel.pipeline=4"), and record the keys' places.

    `file` is TOML, or a run's recipe.json, or the name of a shipped recipe. A run without a name takes the file's name.
    Raises RecipeError with all problems.
    """
    file = find_shipped(file)
    if not file.exists():
        near = ", ".join(sorted(str(path) for path in file.parent.glob("*.toml")))
        shipped = f"give a TOML file's path, or a shipped name: {', '.join(shipped_names())}"
        instead = f"in that folder there is {near}" if near else shipped
        raise RecipeError([f"{file}: there is no such file; {instead}"])
    is_json = file.suffix == ".json"
    try:
        tree, text = read_toml(file, is_json=is_json)
    except ValueError as error:
        raise RecipeError([str(error)]) from None
    source = Source(file, {} if is_json else key_lines(text), {_override(tree, each): each for each in settings})
    try:
        # A date becomes text: the recipe must be writable as JSON, which has no dates.
        recipe = Recipe.model_validate(json.loads(json.dumps(tree, default=str)))
    except ValidationError as error:
        found = validation_sentences(error)
        raise RecipeError([source.place(sentence, key or None) + sentence for key, sentence in found]) from None
    if recipe.run.name is None:
        recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"name": file.stem})})
    return recipe, source


def read_resolved(folder: Path) -> Recipe:
    """The recipe of a run's folder. Raises OSError, or ValueError if the file is not a recipe of this version."""
    return Recipe.model_validate_json((folder / RECIPE).read_text(encoding="utf-8"))


def shipped_folder() -> Path:
    """The folder of the recipes that come with the package."""
    return Path(__file__).resolve().parents[1] / "recipes"


def shipped_names() -> list[str]:
    """["bert", "dlrm", ...], sorted."""
    return sorted(path.stem for path in shipped_folder().glob("*.toml"))


def shipped_recipes() -> list[tuple[str, str]]:
    """(name, description) of each shipped recipe. The description is the comment at the top of its file."""
    found = []
    for name in shipped_names():
        lines = (shipped_folder() / f"{name}.toml").read_text(encoding="utf-8").splitlines()
        comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
        found.append((name, " ".join(line.removeprefix("#").strip() for line in comment)))
    return found


def find_shipped(asked: Path) -> Path:
    """The shipped recipe of that name; `asked` itself if it exists, has a folder or an ending, or no recipe has it."""
    is_name = not asked.exists() and asked.name == str(asked) and not asked.suffix and asked.name in shipped_names()
    return shipped_folder() / f"{asked}.toml" if is_name else asked


def _override(tree: dict[str, Any], setting: str) -> Key:
    """Replace the file's value by the setting's; return its key."""
    asked = _SETTING.fullmatch(setting)
    if asked is None:
        raise RecipeError([f"--set {setting}: write section.key=value, such as parallel.pipeline=4"])
    key, value = tuple(asked[1].split(".")), asked[2].strip()
    table = tree
    for end, part in enumerate(key[:-1], 1):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise RecipeError([f"--set {setting}: {'.'.join(key[:end])} is a value, and has no keys"])
    if value:
        table[key[-1]] = _value(setting, value)
    else:
        # An empty value removes the key: this is how a recipe changes from steps to epochs.
        table.pop(key[-1], None)
    return key


def _value(setting: str, text: str) -> Any:
    try:
        read = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as error:
        if text[0] not in "[{\"'" and "\n" not in text:
            return text
        raise RecipeError([f"--set {setting}: the value is not TOML: {reason(error)}"]) from None
    if len(read) > 1:
        raise RecipeError([f"--set {setting}: give each setting its own --set"])
    return read["value"]
