"""Set the rank and size that torch's C++ code reads from a backend written in Python.

`ProcessGroup::getRank` and `getSize` return two integers of the C++ class `Backend`. torch's own backends set them when
a group is reconfigured. Python has no way to: torch binds neither the fields nor a setter. So the two integers are
written where they lie. The place is found at run time, from backends with known ranks and sizes, and each write is
checked by reading it back through torch. Where the place is not found, netfold offers no `reconfigure`.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from torch._C import _distributed_c10d as _c10d

# Pairs that occur nowhere else in a small object.
_PROBES = ((0x5EED_0A11, 0x5EED_0B17), (0x1DEA_0C0D, 0x1DEA_0F0E))
# Backend begins with a table of methods, a reference count, and pointers to Python; the rank comes right after.
_SEARCHED_BYTES = 64
# pybind11 keeps the address of the C++ object behind the header of a Python object.
_HEADER_BYTES = object.__basicsize__


@functools.cache
def is_possible() -> bool:
    return _offset() is not None


def set_rank(backend: Any, rank: int, size: int) -> None:
    """Raises RuntimeError where torch then reads other numbers."""
    offset = _offset()
    if offset is not None:
        pair = _pair(backend, offset)
        if (pair[0], pair[1]) == (backend.rank(), backend.size()):
            pair[0], pair[1] = rank, size
    if (backend.rank(), backend.size()) != (rank, size):
        raise RuntimeError(f"this torch does not let a backend in Python have a new rank ({rank} of {size})")


@functools.cache
def _offset() -> int | None:
    """Bytes from the begin of a C++ Backend to its rank, which its size follows; None: not found."""
    found: set[int] | None = None
    for rank, size in _PROBES:
        probe = _Probe(rank, size)
        places = {
            offset
            for offset in range(0, _SEARCHED_BYTES, ctypes.sizeof(ctypes.c_int))
            if tuple(_pair(probe, offset)) == (rank, size)
        }
        found = places if found is None else found & places
    return found.pop() if found is not None and len(found) == 1 else None


class _Probe(_c10d.Backend):
    pass


def _pair(backend: Any, offset: int) -> Any:
    address = ctypes.c_void_p.from_address(id(backend) + _HEADER_BYTES).value
    assert address is not None
    return (ctypes.c_int * 2).from_address(address + offset)
