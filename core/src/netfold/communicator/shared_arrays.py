"""Arrays in memory that other ranks of the machine can map, so that collectives read and write them in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from netfold._native import engine


class _Memory:
    """NumPy's array interface over shared memory. The array keeps this object alive, which owns the memory."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        count = int(np.prod(shape, dtype=np.int64))
        self._buffer = engine.ShmBuffer(count * dtype.itemsize)
        self.__array_interface__ = {
            "shape": shape,
            "typestr": dtype.str,
            "data": (self._buffer.address, False),
            "version": 3,
        }


def empty(shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> np.ndarray[Any, Any]:
    """A zeroed C-contiguous array of `shape` in shared memory.

    A collective of more than 16 KB makes no copy if its tensors are in such arrays, or in views of them, on every rank
    of a machine: about half the memory traffic of ordinary arrays. The memory is freed with the last view. It is
    anonymous (memfd): it uses no space in /dev/shm, and counts towards this process's memory limit. A forked child
    shares the memory with its parent. Cost: a few system calls, and a page fault a page and rank at first use; pages
    of 2 MB where the machine gives them to shared memory that asks (docs/how-to/tune.md).
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(int(size) for size in shape)
    if any(size < 0 for size in sizes):
        raise ValueError(f"no array has the shape {sizes}")
    return np.asarray(_Memory(sizes, np.dtype(dtype)))
