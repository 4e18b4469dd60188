"""Pairs of a value and its index, as min_loc and max_loc reduce them.

Users hold two arrays, as `argmin` returns them: no array library beside NumPy has structured elements, and DLPack has
none. In a message a pair is 16 bytes: an f64 or i64 and an i64 index. Every narrower type fits in one of the two
without loss, so there are two pair types (netfold/kernels/types.hpp).
"""

from __future__ import annotations

import numpy as np

from netfold.communicator.arrays import Array

LOC_OPS = ("min_loc", "max_loc")

_FLOAT = np.dtype([("value", np.float64), ("index", np.int64)])
_INTEGER = np.dtype([("value", np.int64), ("index", np.int64)])
# With this bit flipped, unsigned 64-bit numbers keep their order when read as signed ones.
_TOP_BIT = np.uint64(1 << 63)


def pack(values: Array, indices: Array) -> tuple[Array, str]:
    """The pairs, and the native name of their type. TypeError, ValueError in a sentence."""
    if indices.dtype.kind not in "iu" or indices.dtype == np.uint64:
        raise TypeError(f"indices must be integers that fit int64, not {indices.dtype.name}")
    if values.shape != indices.shape:
        raise ValueError(f"values have the shape {values.shape}, indices {indices.shape}; each value needs one index")
    if values.dtype.kind == "f" or values.dtype.name == "bfloat16":
        if values.dtype.itemsize > 8:
            raise TypeError(f"values of {values.dtype.name} do not fit the 64 bits of a pair")
        pairs = np.empty(values.shape, _FLOAT)
        pairs["value"] = values
    elif values.dtype.kind in "biu":
        pairs = np.empty(values.shape, _INTEGER)
        pairs["value"] = (values ^ _TOP_BIT).view(np.int64) if values.dtype == np.uint64 else values
    else:
        raise TypeError(f"values of {values.dtype.name} have no order")
    pairs["index"] = indices
    return pairs, "f64_i64" if pairs.dtype == _FLOAT else "i64_i64"


def unpack(pairs: Array, values: Array, indices: Array) -> None:
    """Write reduced pairs back into the arrays that they came from."""
    found = pairs["value"]
    values[...] = np.ascontiguousarray(found).view(np.uint64) ^ _TOP_BIT if values.dtype == np.uint64 else found
    indices[...] = pairs["index"]
