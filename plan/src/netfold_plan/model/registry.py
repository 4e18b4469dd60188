"""Models by name, or by kind and dimensions: `gpt3-175b`, `gpt:hidden=12288,layers=96,heads=96`, `resnet50`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from netfold_plan.model import catalogue
from netfold_plan.model.layer_cost import Model
from netfold_plan.model.layered import Layered
from netfold_plan.model.timed_step import read_timed_step
from netfold_plan.model.transformer import Transformer
from netfold_plan.toml_file import read_toml
from netfold_plan.words import suggest

_PRESETS = Path(__file__).parent / "presets.toml"
# Keys of a transformer with their defaults; None: the key is required.
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
    return read_toml(_PRESETS)[0]


def names() -> tuple[str, ...]:
    """Presets, then the catalogue's models; a name of both is the preset's."""
    presets = tuple(model_presets())
    return (*presets, *(name for name in catalogue.MODELS if name not in presets))


def find_model(said: str) -> Model:
    """Find a model by a name, by `kind:key=value,...`, or by the path of a profile of one host's step (.json).

    A name can have keys, too: `bert-large:sequence=128`. Raises ValueError, in one sentence, for any other text.
    """
    if said.endswith(".json"):
        return read_timed_step(Path(said))
    name, _, text = said.partition(":")
    keys: dict[str, Any] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        key, equals, value = (each.strip() for each in part.partition("="))
        if not equals:
            raise ValueError(f"model {said!r}: {part!r} has no value; write it as hidden=12288")
        if key in keys:
            raise ValueError(f"model {said!r}: has {key} twice; leave one out")
        keys[key] = int(value) if value.isdecimal() else _TRUTHS.get(value, value)
    return model_of(name, keys)


def model_of(name: str, keys: Mapping[str, Any]) -> Model:
    """name: one of `names`, or a kind. Raises ValueError, in one sentence, for an unknown name, key or value."""
    presets = model_presets()
    if name in KINDS:
        return _transformer(name, name, {}, keys)
    if name in presets:
        preset = {key: value for key, value in presets[name].items() if key not in ("source", "kind")}
        return _transformer(name, presets[name]["kind"], preset, keys)
    if name in names():
        return _layered(name, keys)
    raise ValueError(
        f"there is no model {name!r}; {suggest(name, (*KINDS, *names()))} (`netfold plan models` lists them, or "
        "gpt:hidden=..,layers=..,heads=..)"
    )


_TRUTHS = {"true": True, "false": False}


def _transformer(name: str, kind: str, preset: Mapping[str, Any], keys: Mapping[str, Any]) -> Transformer:
    known = KINDS[kind]
    for key, value in keys.items():
        if key not in known:
            raise ValueError(f"model {name}: {key!r} is not a dimension of a {kind}; {suggest(key, known)}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"model {name}: {key} is {value!r}; it must be a whole number, at least 1")
    size = {key: default for key, default in known.items() if default is not None} | dict(preset) | dict(keys)
    missing = [key for key in known if key not in size]
    if missing:
        raise ValueError(f"model {name}: has no {' and no '.join(missing)}; write for example {missing[0]}=24")
    if size["hidden"] % size["heads"]:
        raise ValueError(f"model {name}: hidden {size['hidden']} is not a multiple of {size['heads']} heads")
    said = f"{name}:{','.join(f'{key}={value}' for key, value in keys.items())}" if keys else name
    return Transformer(said, size["hidden"], size["heads"], size["layers"], size["sequence"], size["vocabulary"])


def _layered(name: str, keys: Mapping[str, Any]) -> Layered:
    for key, value in keys.items():
        if key != "measured" or not isinstance(value, bool):
            raise ValueError(f"model {name}: {key} = {value!r} is not known; its only key is measured=true")
    return Layered(name, bool(keys.get("measured", False)))
