"""TOML files and the keys of their tables: every error names the file and the key. Pure but for reading a file."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from netfold.quantity import parse_quantity
from netfold_plan.words import suggest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_AT = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")
# Larger than any count of hosts, ports or cores, and small enough for a division as a float.
_LARGEST = 1 << 40


def read_toml(path: Path, what: str = "", *, is_json: bool = False) -> tuple[dict[str, Any], str]:
    """The keys of a file, and its text. what: begins an error, before the path. Raises ValueError, in one sentence.

    is_json: the file has JSON in place of TOML.
    """
    where, text = f"{what} {path}".strip(), ""
    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if is_json else tomllib.loads(text), text
    except OSError as error:
        raise ValueError(f"{where}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: cannot be read: byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise ValueError(f"{where}: lists or tables are nested too deeply to be read") from None
    except ValueError as error:  # Another syntax, or a number of thousands of digits.
        at = _AT.search(str(error))
        line = getattr(error, "lineno", None) or (int(at[1]) if at and at[1] else len(text.splitlines()))
        kind, see = ("JSON", "") if is_json else ("TOML", "; see toml.io")
        raise ValueError(f"{where}:{line}: this is not {kind}: {reason(error)}{see}") from None


def reason(error: ValueError) -> str:
    """The text of a parser's error, without its place in the text."""
    return _AT.sub("", getattr(error, "msg", None) or str(error))


class Table:
    """A table of a file. where: begins every error. Every method raises ValueError, in one sentence, for a bad
    value."""

    def __init__(self, keys: Mapping[str, Any], where: str, known: Sequence[str], required: Sequence[str] = ()) -> None:
        self.keys, self.where = keys, where
        for key in keys:
            if key not in known:
                raise self.error(f"{key!r} is not known; {suggest(key, known)}")
        for key in required:
            if key not in keys:
                raise self.error(f"has no {key}")

    def error(self, text: str) -> ValueError:
        return ValueError(f"{self.where}: {text}")

    def __contains__(self, key: str) -> bool:
        return key in self.keys

    def tables(self, key: str) -> list[dict[str, Any]]:
        """A list of tables; empty without the key."""
        found = self.keys.get(key, [])
        if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
            raise self.error(f"{key} must be a list of tables")
        return found

    def quantity(self, key: str, kind: str, default: float = 0.0) -> float:
        """kind: as in `parse_quantity`."""
        return parse_quantity(self.keys[key], kind, f"{self.where}, {key}") if key in self.keys else default

    def positive(self, key: str, kind: str) -> float:
        """A quantity above 0. The key must be there."""
        found = self.quantity(key, kind)
        if found <= 0:
            raise self.error(f"{key} is 0; it must be more")
        return found

    def whole(self, key: str, default: int = 0) -> int:
        value = self.keys.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST:
            raise self.error(f"{key} = {value!r}; it must be a whole number from 1 to {_LARGEST}")
        return value

    def number(self, key: str, default: float, least: float = 0.0, most: float = sys.float_info.max) -> float:
        value = self.keys.get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not least <= value <= most:
            bounds = f"from {least:g} to {most:g}" if most < sys.float_info.max else f"not below {least:g}"
            raise self.error(f"{key} = {value!r}; it must be a number {bounds}")
        return float(value)

    def truth(self, key: str, default: bool = False) -> bool:
        value = self.keys.get(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{key} = {value!r}; it must be true or false")
        return value
