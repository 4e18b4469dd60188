"""Shared objects in C that tests load."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def compile_library(source: Path, library: Path, *flags: str) -> str:
    """Compile `source` into `library`, and return its path. Without a C compiler, skip the test with the reason."""
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        pytest.skip(f"{source.name} cannot be built: no C compiler is on the PATH")
    command = [compiler, "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-pthread", *flags, "-o", library, source]
    subprocess.run(command, check=True, timeout=60)
    return str(library)
