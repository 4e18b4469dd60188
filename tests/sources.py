"""The files of the project, as a clone has them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("core", "plan", "train", "lab")
SOURCES = [ROOT / package / "src" for package in PACKAGES]
# For processes that tests start: what the tests of all packages share.
HELPERS = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "core" / "tests")])
# Folders that are built, or hold no text of the project.
_NOT_OURS = re.compile(r"\..+|build(-.*)?|dist|__pycache__|.*\.egg-info|netfold-demo|corpus")
_HIDDEN = {".ci", ".github"}


def files() -> Iterator[Path]:
    """Relative to ROOT. Needs no git, which a machine that got the sources in another way may lack."""
    for folder, folders, names in os.walk(ROOT):
        folders[:] = sorted(name for name in folders if name in _HIDDEN or not _NOT_OURS.fullmatch(name))
        for name in sorted(names):
            yield (Path(folder) / name).relative_to(ROOT)
