"""A libfabric whose messages are those of a hostile peer, and whose reads fail (hostile_libfabric.c)."""

from __future__ import annotations

import ctypes
from enum import IntEnum
from pathlib import Path

from c_library import compile_library
from fabrics import real_library


class Hostile(IntEnum):
    """The messages that it changes, once the plugin has made them."""

    HONEST = 0
    LONGER = 1  # the first chunk's header: it has twice the bytes that were written
    TWICE = 2  # each chunk's bytes are where those of the first are
    FOREIGN = 3  # a chunk's bytes are in memory that was not granted
    EAGER = 4  # an announcement: the bytes follow at once
    REFUSED = 5  # an accept: nothing goes by RMA
    READ_REFUSED = 6
    READ_FAILS = 7  # of a key that does not exist
    READ_HANGS = 8
    UNOPENED = 9  # no endpoint can be opened


def built_hostile(folder: Path) -> str:
    source = Path(__file__).with_name("hostile_libfabric.c")
    real = real_library()
    return compile_library(source, folder / "libfabric.so.1", "-Wl,-soname,libfabric.so.1", f'-DREAL="{real}"')


class HostileLibrary:
    """Loaded in a rank before the plugin opens libfabric."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)

    def _value(self, name: str) -> ctypes.c_int:
        return ctypes.c_int.in_dll(self._library, name)

    def becomes(self, what: Hostile) -> None:
        self._value("hostile").value = what

    @property
    def changed(self) -> int:
        """Messages."""
        return self._value("changed").value

    @property
    def reads(self) -> int:
        return self._value("reads").value
