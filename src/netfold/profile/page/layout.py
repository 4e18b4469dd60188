"""What every page of netfold's is: one HTML file, no network, light and dark, on a phone and on paper.

Its style and its scripts (errors, tables) are in this folder; a page adds its own.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from netfold.profile.page.escape import embed, escape

_FOLDER = Path(__file__).parent


def render_layout(
    *,
    title: str,
    headline: str,
    opening: str,
    facts: Iterable[tuple[str, str]],
    sections: Sequence[tuple[str, str, str]],
    data: tuple[str, Any],
    style: Path | None = None,
    scripts: Sequence[Path] = (),
) -> str:
    """The page. title, headline: text. opening: HTML below the headline. facts: a number and its meaning each.

    sections: (id, title, HTML); one without HTML is left out. data: id and value of what the page carries as JSON.
    style, scripts: files beside those that all pages have.
    """
    texts = [path.read_text(encoding="utf-8") for path in (_FOLDER / "errors.js", _FOLDER / "tables.js", *scripts)]
    # What is no script of ours does not run, should it ever get past the escaping; pictures are in the page itself.
    allowed = f"style-src 'unsafe-inline'; img-src data:; script-src {' '.join(map(_hash_of, texts))}"
    styles = [path.read_text(encoding="utf-8") for path in (_FOLDER / "style.css", style) if path is not None]
    first, *later = (f"<script>{text}</script>" for text in texts)
    body = "".join(
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{heading}</h2>{html}</section>'
        for name, heading, html in sections
        if html
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; {allowed}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{"".join(styles)}</style>
{first}
</head>
<body>
<main>
<h1>{escape(headline)}</h1>
{opening}
<div class="facts">{facts_of(facts)}</div>
{body}
</main>
{embed(*data)}
{"".join(later)}
</body>
</html>
"""


def facts_of(facts: Iterable[tuple[str, str]]) -> str:
    """A few numbers, for an element of class facts."""
    return "".join(
        f"<div><strong>{escape(number)}</strong><span>{escape(meaning)}</span></div>" for number, meaning in facts
    )


def _hash_of(script: str) -> str:
    """As a page's policy names a script that may run."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
