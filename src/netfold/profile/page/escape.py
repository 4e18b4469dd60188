"""Values of a run on their way into the page: as JSON that ends no script, as text that is no markup.

A run comes from anywhere. Its command line may hold `</script>`, a host's name what is no UTF-8.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np


def escape(text: object) -> str:
    """For HTML, in elements and in quoted attributes. What cannot be written as UTF-8 becomes `?`."""
    return html.escape(str(text).encode("utf-8", "replace").decode())


def embed(name: str, value: Any) -> str:
    """A JSON block that the page's scripts, and whoever reads the file later, find by its id."""
    # ASCII alone, and none of it opens or closes an element or a comment.
    text = json.dumps(to_plain(value), separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return f'<script type="application/json" id="{name}">{text}</script>'


def to_plain(value: Any) -> Any:
    """Dataclasses as objects, by the names of their fields. A number that is not finite has no place in JSON: null."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(each) for each in value]
    if isinstance(value, np.generic):
        value = value.item()
    return value if is_known(value) else None


def is_known(value: object) -> bool:
    """Whether there is anything to show: None is not, nor is a number that is not finite."""
    return value is not None and not (isinstance(value, (float, np.floating)) and not math.isfinite(value))
