"""Memory that stands in for a GPU's: every direct access to its address ends the process (strict_endpoint.hpp)."""

from __future__ import annotations

import ctypes
import mmap
import os
from types import SimpleNamespace

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_PROT_NONE = 0


class GpuMemory:
    """`bytes_` bytes at an address for the plugin alone. `values` is a second mapping, by which the test sees them.

    Offers what `Plugin` reads of an array: `nbytes` and `ctypes.data`.
    """

    def __init__(self, bytes_: int) -> None:
        self.descriptor = os.memfd_create("gpu")
        mapped = max(bytes_, 1)
        os.ftruncate(self.descriptor, mapped)
        address = _libc.mmap(None, mapped, _PROT_NONE, mmap.MAP_SHARED, self.descriptor, 0)
        assert address not in (None, ctypes.c_void_p(-1).value), ctypes.get_errno()
        self.values = np.frombuffer(mmap.mmap(self.descriptor, mapped), np.uint8)[:bytes_]
        self.address = int(address)
        self.nbytes = bytes_
        self.ctypes = SimpleNamespace(data=self.address)

    def free(self) -> None:
        assert _libc.munmap(self.address, max(self.nbytes, 1)) == 0

    def part(self, begin: int, bytes_: int) -> SimpleNamespace:
        """Some of its bytes, as a message names them."""
        return SimpleNamespace(nbytes=bytes_, ctypes=SimpleNamespace(data=self.address + begin))
