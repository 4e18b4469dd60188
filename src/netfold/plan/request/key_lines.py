"""Where each key of a TOML text stands, so that an error can name a line. tomllib does not tell."""

from __future__ import annotations

import re
from collections.abc import Mapping

Key = tuple[str, ...]

_STRING = r'"""(?:\\.|[^\\])*?"""|\'\'\'.*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\''
# One piece of a text. What is none of the others is a piece of one character.
_PIECE = re.compile(rf"(?P<string>{_STRING})|(?P<comment>\#[^\n]*)|(?P<bare>[A-Za-z0-9_-]+)|.", re.DOTALL)


def key_lines(text: str) -> Mapping[Key, int]:
    """Key, from the root -> its line, from 1. `text` is TOML that has been read without an error.

    Tables are there by their headers. A key inside an inline table is not: `line_of` finds the table's own.
    """
    found: dict[Key, int] = {}
    table: Key = ()
    # Of the statement that is being read: its key so far, whether it is a [header], and how deep its value's brackets.
    key: list[str] = []
    header, in_value, depth, line = False, False, 0, 1
    for piece in _PIECE.finditer(text):
        said = piece.group()
        if said == "\n" and depth <= 0:
            # Below 0 after a [[header]].
            key, header, in_value, depth = [], False, False, 0
        elif piece["comment"]:
            pass
        elif in_value:
            depth += (said in "[{") - (said in "]}") if len(said) == 1 else 0
        elif said == "[" and not key:
            header = True
        elif said == "]" and header:
            table, in_value = tuple(key), True
            found.setdefault(table, line)
        elif said == "=":
            in_value = True
            for end in range(1, len(key) + 1):
                found.setdefault((*table, *key[:end]), line)
        elif piece["string"] or piece["bare"]:
            key.append(said[1:-1] if piece["string"] else said)
        line += said.count("\n")
    return found


def line_of(key: Key, found: Mapping[Key, int]) -> int | None:
    """The line of the key, or of the closest table round it; None where nothing of it is in the text."""
    return next((found[key[:end]] for end in range(len(key), 0, -1) if key[:end] in found), None)
