"""The line of each key of a TOML text, so that an error can name the line: tomllib does not report lines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

Key = tuple[str, ...]
_Place = TypeVar("_Place")

_STRING = r'"""(?:\\.|[^\\])*?"""|\'\'\'.*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\''
# One token of a text; any other character is a token of its own.
_TOKEN = re.compile(rf"(?P<string>{_STRING})|(?P<comment>\#[^\n]*)|(?P<bare>[A-Za-z0-9_-]+)|.", re.DOTALL)


def key_lines(text: str) -> Mapping[Key, int]:
    """Key, from the root -> its line, from 1. `text` is TOML that tomllib has read without an error.

    A table has the line of its header. Keys inside an inline table are missing: `line_of` finds the line of the table.
    """
    found: dict[Key, int] = {}
    table: Key = ()
    # The statement that is being read: its key so far, whether it is a [header], and the nesting of its value's
    # brackets.
    key: list[str] = []
    header, in_value, depth, line = False, False, 0, 1
    for token in _TOKEN.finditer(text):
        character = token.group()
        if character == "\n" and depth <= 0:
            # The depth is below 0 after a [[header]].
            key, header, in_value, depth = [], False, False, 0
        elif token["comment"]:
            pass
        elif in_value:
            depth += (character in "[{") - (character in "]}") if len(character) == 1 else 0
        elif character == "[" and not key:
            header = True
        elif character == "]" and header:
            table, in_value = tuple(key), True
            found.setdefault(table, line)
        elif character == "=":
            in_value = True
            for end in range(1, len(key) + 1):
                found.setdefault((*table, *key[:end]), line)
        elif token["string"] or token["bare"]:
            key.append(character[1:-1] if token["string"] else character)
        line += character.count("\n")
    return found


def line_of(key: Key, found: Mapping[Key, _Place]) -> _Place | None:
    """The line, or another place, of the key or of the closest table around it; None where the text has neither."""
    return next((found[key[:end]] for end in range(len(key), 0, -1) if key[:end] in found), None)
