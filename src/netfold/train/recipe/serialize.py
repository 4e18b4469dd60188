"""Write a recipe with all its defaults as TOML, so that a run can be read and repeated.

Python reads TOML and does not write it; a recipe's tables hold text, numbers, lists and tables of these.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from netfold.train.recipe import Factory, Recipe

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NAME = "recipe.toml"


def to_toml(recipe: Recipe) -> str:
    """TOML that loads to an equal recipe. Raises ValueError if TOML cannot express an option of a factory."""
    lines = []
    for section, keys in recipe.model_dump().items():
        if keys is None:
            continue
        lines.append(f"[{section}]")
        has_factory = isinstance(getattr(recipe, section), Factory)
        for key, value in keys.items():
            # A section's key that is None was not given; a factory may give its own None a meaning.
            if value is not None or has_factory:
                lines.append(f"{_key(key)} = {_value(value, f'{section}.{key}')}")
        lines.append("")
    return "\n".join(lines)


def read_resolved(folder: Path) -> Recipe:
    """The recipe of a run's folder. Raises OSError, tomllib.TOMLDecodeError or pydantic's ValidationError."""
    return Recipe.model_validate(tomllib.loads((folder / NAME).read_text(encoding="utf-8")))


def _value(value: Any, where: str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (str, Path)):
        return _text(str(value))
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_value(each, where) for each in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_key(str(key))} = {_value(each, where)}' for key, each in value.items())}}}"
    raise ValueError(f"{where} is {value!r}, which a recipe file cannot hold: use text, numbers, lists and tables")


def _key(key: str) -> str:
    return key if key.isascii() and key.replace("_", "").replace("-", "").isalnum() else _text(key)


def _text(text: str) -> str:
    # JSON's escapes are TOML's, except for DEL and for characters that JSON writes as surrogate pairs.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
