"""What a run was: its recipe with all defaults, and where each of its starts ran."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from netfold.profile.page.escape import escape
from netfold.train.callbacks.run_folder import ENVIRONMENT
from netfold.train.recipe.serialize import NAME


def provenance(folder: Path) -> str:
    """Files that are not there are left out: a page can be made of metrics alone."""
    said = ""
    if (folder / NAME).exists():
        said += f'<pre tabindex="0"><code>{escape((folder / NAME).read_text(encoding="utf-8").strip())}</code></pre>'
    if (folder / ENVIRONMENT).exists():
        starts = json.loads((folder / ENVIRONMENT).read_text(encoding="utf-8"))["starts"]
        said += _terms(starts[-1])
        if len(starts) > 1:
            said += f'<p class="quiet">Of the last of {len(starts)} starts; environment.json has all.</p>'
    return said


def _terms(start: dict[str, Any]) -> str:
    hosts: dict[str, list[dict[str, Any]]] = {}
    for rank in start["ranks"]:
        hosts.setdefault(rank["host"], []).append(rank)
    terms = [(name, version) for name, version in start["versions"].items()]
    terms += [("command", " ".join(start["command"])), ("commit", start["commit"] or "none: not in a git work tree")]
    terms += [
        (host, f"{len(ranks)} of the ranks; {ranks[0]['cores']} cores, {ranks[0]['cpu']}; Linux {ranks[0]['kernel']}")
        for host, ranks in hosts.items()
    ]
    terms += list(start["settings"].items())
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in terms)
    return f"<dl>{rows}</dl>"
