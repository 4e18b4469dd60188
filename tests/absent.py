"""Processes in which packages are not installed, whatever this environment has."""

from __future__ import annotations

import os
from pathlib import Path

_SITE = """
import importlib.machinery
gone = {gone!r}
real = importlib.machinery.PathFinder.find_spec.__func__
@classmethod
def find_spec(cls, name, path=None, target=None):
    return None if name.partition(".")[0] in gone else real(cls, name, path, target)
importlib.machinery.PathFinder.find_spec = find_spec
"""


def without(folder: Path, *packages: str) -> dict[str, str]:
    """An environment for processes, and for theirs, in which no import finds `packages`."""
    site = folder / ("without-" + "-".join(packages))
    site.mkdir()
    (site / "sitecustomize.py").write_text(_SITE.format(gone=set(packages)))
    return {**os.environ, "PYTHONPATH": str(site)}
