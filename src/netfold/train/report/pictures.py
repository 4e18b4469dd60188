"""A row of pictures: PNG files in the run's folder, embedded in its page."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from netfold.page.escape import escape
from netfold.train.examples import Panel

FOLDER, _INDEX = "pictures", "pictures.json"


def write_pictures(folder: Path, step: int, panels: Sequence[Panel]) -> None:
    """Replace the pictures in the folder, and then their list."""
    (folder / FOLDER).mkdir(exist_ok=True)
    listed = []
    for panel in panels:
        file = f"{panel.title}.png".replace(" ", "-")
        Image.fromarray(panel.pixels.permute(1, 2, 0).contiguous().numpy()).save(folder / FOLDER / file)
        listed.append({"title": panel.title, "said": panel.said, "file": file})
    (folder / FOLDER / _INDEX).write_text(json.dumps({"step": step, "panels": listed}, indent=1), encoding="utf-8")


def pictures(folder: Path) -> str:
    """The pictures as HTML; empty if the run has none."""
    index = folder / FOLDER / _INDEX
    if not index.exists():
        return ""
    found = json.loads(index.read_text(encoding="utf-8"))
    figures = "".join(
        f'<figure><img alt="{escape(panel["title"])}" src="data:image/png;base64,'
        f'{base64.b64encode((folder / FOLDER / panel["file"]).read_bytes()).decode()}">'
        f"<figcaption>{escape(panel['title'])} <strong>{escape(panel['said'])}</strong></figcaption></figure>"
        for panel in found["panels"]
    )
    return f'<div class="pictures">{figures}</div><p class="quiet">After step {found["step"]:,}.</p>'
