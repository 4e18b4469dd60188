"""Mutants: production's source with one text changed, compiled or executed."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from load import run


def change(before: str, text: str, instead: str, name: str) -> str:
    """`before`, a source of that name, with `instead` in place of `text`, which must stand in it once: LookupError."""
    if before.count(text) != 1:
        raise LookupError(f"{name} has {before.count(text)} times, and not once: {text}")
    return before.replace(text, instead)


def change_file(file: Path, text: str, instead: str, folder: Path) -> Path:
    """The same in a copy of the file in `folder`; its path."""
    copy = folder / file.name
    copy.write_text(change(file.read_text(), text, instead, file.name))
    return copy


def build(out: Path, sources: Iterable[Path], includes: Iterable[Path], *options: str) -> Path:
    """Compile C++ of any use (-c, -shared) into `out`. subprocess.CalledProcessError where it does not compile."""
    command = ["c++", "-std=c++20", "-fPIC", *options, *(f"-I{folder}" for folder in includes)]
    run([*command, *sources, "-o", out], 300, check=True)
    return out


def load(library: Path, sources: Iterable[Path], includes: Iterable[Path], *options: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(build(library, sources, includes, "-shared", *options)))


def execute(module: ModuleType, source: str, first: str) -> dict[str, Any]:
    """The module's names, of which those that `source` defines from the text `first` on are defined anew.

    So classes that stand before it stay production's, and whoever compares with them finds them.
    """
    names = dict(vars(module))
    exec("from __future__ import annotations\n" + source[source.index(first) :], names)
    return names
