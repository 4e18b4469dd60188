"""A terminal for tables: what users and other programs wrote is printed as it stands."""

from __future__ import annotations

from typing import Any

from rich.console import Console


def plain_console(**options: Any) -> Console:
    """A console that never reads markup or emoji codes: `[fault_tolerance]` and `module:factory:width` are plain text.

    Colours come from styles and `rich.text.Text`, never from the text. options: those of `rich.console.Console`.
    """
    return Console(markup=False, emoji=False, **options)
