"""Put values into a page: text that is not markup, and JSON that does not end its script element.

The values come from a run and may be hostile or broken: a command line may hold `</script>`, a host name invalid UTF-8.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np


def escape(text: object) -> str:
    """Escape text for HTML elements and quoted attributes. Characters that UTF-8 cannot encode become `?`."""
    return html.escape(str(text).encode("utf-8", "replace").decode())


def items(texts: Iterable[str], kind: str = "") -> str:
    """A list element with one item for each text; empty without texts. kind: the element's class."""
    found = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<ul{attribute('class', kind)}>{found}</ul>" if found else ""


def attribute(name: str, value: str) -> str:
    """An attribute of an element; empty for an empty value."""
    return f' {name}="{escape(value)}"' if value else ""


def terms(pairs: Iterable[tuple[object, object]]) -> str:
    """A description list of (name, value)."""
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(value)}</dd>' for name, value in pairs)}</dl>"


def embed(name: str, value: Any) -> str:
    """A JSON block with an id, for the page's scripts and for programs that read the file."""
    # json.dumps writes ASCII only. Without <, > and & the text cannot open or close an element or a comment.
    text = json.dumps(to_plain(value), separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return f'<script type="application/json" id="{name}">{text}</script>'


def to_plain(value: Any) -> Any:
    """Convert a value for JSON: a dataclass to an object, a number that is not finite to null."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(each) for each in value]
    if isinstance(value, np.generic):
        value = value.item()
    return value if is_known(value) else None


def pick(value: object, *names: str) -> dict[str, Any]:
    """Select attributes of a value for JSON, by name."""
    return {name: getattr(value, name) for name in names}


def is_known(value: object) -> bool:
    """False for None and for a number that is not finite."""
    return value is not None and not (isinstance(value, (float, np.floating)) and not math.isfinite(value))
