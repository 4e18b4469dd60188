"""Models by a name, or by a kind and its dimensions: `gpt3-175b`, `gpt:hidden=12288,layers=96,heads=96`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from netfold.plan.model.transformer import Transformer
from netfold.plan.model.work import Model
from netfold.plan.words import nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_PRESETS = Path(__file__).parent / "presets.toml"
# Keys of a transformer, each with what holds where it is not said; None: it must be said.
_DIMENSIONS: dict[str, int | None] = {
    "hidden": None,
    "layers": None,
    "heads": None,
    "sequence": 2048,
    "vocabulary": 51200,
}
KINDS = {"gpt": _DIMENSIONS, "bert": _DIMENSIONS | {"sequence": 512, "vocabulary": 30522}}


@lru_cache(maxsize=1)
def model_presets() -> dict[str, dict[str, Any]]:
    """Name -> kind, dimensions, source."""
    return tomllib.loads(_PRESETS.read_text(encoding="utf-8"))


def find_model(said: str, others: Sequence[str] = ()) -> Model:
    """A preset's name, or `kind:key=value,...`; a preset's keys can be changed: `bert-large:sequence=128`.

    others: names that are known elsewhere, to be suggested. Raises ValueError, in a sentence, for any other.
    """
    name, _, text = said.partition(":")
    keys: dict[str, Any] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"model {said!r}: {part!r} says no value; write it as hidden=12288")
        if key in keys:
            raise ValueError(f"model {said!r}: says {key} twice; leave one out")
        keys[key.strip()] = int(value) if value.strip().isdecimal() else value.strip()
    return model_of(name, keys, others)


def model_of(name: str, keys: Mapping[str, Any], others: Sequence[str] = ()) -> Model:
    """name: of a preset, or a kind. others: as `find_model` has them.

    Raises ValueError, in a sentence, for a name, a key or a value that is none.
    """
    presets = model_presets()
    if name in KINDS:
        kind, said = name, dict(keys)
    elif name in presets:
        preset = {key: value for key, value in presets[name].items() if key != "source"}
        kind = preset.pop("kind")
        said = preset | dict(keys)
    elif name in others:
        raise ValueError(f"model {name}: has no dimensions to change; leave out {', '.join(keys) or 'the colon'}")
    else:
        raise ValueError(
            f"there is no model {name!r}; {nearest(name, (*KINDS, *presets, *others))} (`netfold plan models` lists "
            "them, or gpt:hidden=..,layers=..,heads=..)"
        )
    known = KINDS[kind]
    for key, value in said.items():
        if key not in known:
            raise ValueError(f"model {name}: {key!r} is no dimension of a {kind}; {nearest(key, known)}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"model {name}: {key} is {value!r}; it must be a whole number, at least 1")
    missing = [key for key, default in known.items() if default is None and key not in said]
    if missing:
        raise ValueError(f"model {name}: says nothing of its {' and '.join(missing)}; such as {missing[0]}=24")
    size = {key: default for key, default in known.items() if default is not None} | said
    if size["hidden"] % size["heads"]:
        raise ValueError(
            f"model {name}: hidden {size['hidden']} is not shared out evenly by {size['heads']} heads; take a multiple"
        )
    return Transformer(
        name if name in presets and not keys else f"{name}:{','.join(f'{key}={value}' for key, value in keys.items())}",
        size["hidden"],
        size["heads"],
        size["layers"],
        size["sequence"],
        size["vocabulary"],
    )
