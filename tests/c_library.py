"""Shared objects in C that tests load."""

from __future__ import annotations

import shutil
from pathlib import Path

from load import run


def compile_library(source: Path, library: Path, *flags: str) -> str:
    """Compile `source` into `library`, and return its path. netfold's build needs a compiler, too."""
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    assert compiler is not None, f"{source.name} cannot be built: none of cc, gcc and clang is on the PATH"
    command = [compiler, "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-pthread", *flags, "-o", library, source]
    run(command, 60, check=True)
    return str(library)
