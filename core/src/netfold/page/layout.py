"""The document of every page: head, style, scripts, headline, numbers, sections."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from netfold.page.escape import embed, escape

_FOLDER = Path(__file__).parent


def render_layout(
    *,
    title: str,
    headline: str,
    opening: str,
    sections: Sequence[tuple[str, str, str]],
    facts: Iterable[tuple[str, str]] = (),
    data: tuple[str, Any] | None = None,
    scripts: Sequence[Path] = (),
) -> str:
    """Return the page as text.

    title, headline: text.
    opening: HTML below the headline.
    sections: (id, title, HTML); a section without HTML is left out.
    facts: (number, meaning), text.
    data: the id and the value of a JSON block.
    scripts: files beside those of every page.
    """
    texts = [path.read_text(encoding="utf-8") for path in (_FOLDER / "errors.js", _FOLDER / "tables.js", *scripts)]
    # A script that got past the escaping does not run. Pictures are inside the page.
    allowed = f"style-src 'unsafe-inline'; img-src data:; script-src {' '.join(map(_hash_of, texts))}"
    first, *later = (f"<script>{text}</script>" for text in texts)
    body = "".join(
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{escape(heading)}</h2>{html}'
        "</section>"
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
<style>{(_FOLDER / "style.css").read_text(encoding="utf-8")}</style>
{first}
</head>
<body>
<main>
<h1>{escape(headline)}</h1>
{opening}
{facts_of(facts)}
{body}
</main>
{embed(*data) if data else ""}
{"".join(later)}
</body>
</html>
"""


def facts_of(facts: Iterable[tuple[str, str]]) -> str:
    """Large numbers, each above its meaning; empty without facts."""
    found = "".join(
        f"<div><strong>{escape(number)}</strong><span>{escape(meaning)}</span></div>" for number, meaning in facts
    )
    return f'<div class="facts">{found}</div>' if found else ""


def _hash_of(script: str) -> str:
    """The source expression by which the page's policy allows a script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
