"""The memory of an array, and what its elements travel as.

NumPy's arrays are taken as they are; anything else by DLPack or the buffer protocol, without a copy. A bool travels as
a byte of 0 or 1, a complex number as its two parts, a bf16 of ml_dtypes as itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from netfold._native import arrays
from netfold.communicator.group import REDUCE_OPS, Region, region

Array: TypeAlias = "np.ndarray[Any, Any]"

# Found by equality, so that the other byte order is not taken for this one.
_NAMES: dict[Any, str] = {
    np.dtype(numpy_name): name
    for numpy_name, name in (
        ("float32", "f32"),
        ("float64", "f64"),
        ("float16", "f16"),
        ("int8", "i8"),
        ("int16", "i16"),
        ("int32", "i32"),
        ("int64", "i64"),
        ("uint8", "u8"),
        ("uint16", "u16"),
        ("uint32", "u32"),
        ("uint64", "u64"),
        ("bool", "bool"),
        ("complex64", "c64"),
        ("complex128", "c128"),
    )
}
_TRANSFER_DTYPES = {"bool": "u8", "c64": "f32", "c128": "f64"}

# What NumPy does with bools; each keeps a byte at 0 or 1.
_BOOL_OPS = ("product", "min", "max", "band", "bor", "bxor")

OPS = ("avg", *(op for op in REDUCE_OPS if not op.endswith("_loc")))


class ArrayView(NamedTuple):
    """An array's memory, for as long as this is held."""

    region: Region
    dtype: str  # f32 ... u64, bool, c64, c128
    shape: tuple[int, ...]
    owner: Any

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def rows(self, counts: Sequence[int]) -> list[Region]:
        """The memory cut along the first axis into so many rows each."""
        address, total_bytes = self.region
        rows = self.shape[0] if self.shape else 1
        row_bytes = total_bytes // rows if rows else 0
        out = []
        for count in counts:
            out.append((address, count * row_bytes))
            address += count * row_bytes
        return out


def array_view(array: Any, *, writable: bool) -> ArrayView:
    """`array`'s memory; TypeError or ValueError in a sentence where it cannot be borrowed so."""
    if not isinstance(array, np.ndarray):
        borrowed = arrays.ExportedArray(array, writable)
        return ArrayView((borrowed.address, borrowed.bytes), borrowed.dtype, borrowed.shape, borrowed)
    # ml_dtypes registers its own dtype object; NumPy cannot name it without that package.
    name = _NAMES.get(array.dtype) or ("bf16" if array.dtype.name == "bfloat16" else None)
    if name is None:
        order = "" if array.dtype.isnative else " in the other byte order"
        known = ", ".join([*map(str, _NAMES), "bfloat16"])
        raise TypeError(f"arrays of {array.dtype.name}{order} cannot travel; there are {known}")
    if not array.flags.c_contiguous:
        raise ValueError("the array must be C-contiguous; pass numpy.ascontiguousarray(array)")
    if writable and not array.flags.writeable:
        raise ValueError("the array is read-only and cannot take a result; pass a copy, or `out`")
    return ArrayView(region(array), name, array.shape, array)


def transfer_type(kind: str, dtype: str, op: str | None) -> tuple[str, str, bool]:
    """(dtype, operator, whether to divide by the ranks) as the native floor knows them; `op` None: a plain move."""
    if op is None:
        return _TRANSFER_DTYPES.get(dtype, dtype), "sum", False
    if op not in OPS:
        raise ValueError(f"{kind}: no operator {op!r}; there are {', '.join(OPS)}")
    if dtype == "bool" and op not in _BOOL_OPS:
        raise ValueError(
            f"{kind}: {op} is not defined for bool; there are {', '.join(_BOOL_OPS)} (max is any, min all)"
        )
    if dtype in ("c64", "c128") and op not in ("sum", "avg"):
        raise ValueError(f"{kind}: {op} is not defined for complex numbers; there are sum and avg")
    return _TRANSFER_DTYPES.get(dtype, dtype), "sum" if op == "avg" else op, op == "avg"


def empty_like(lent: ArrayView, array: Any, shape: tuple[int, ...]) -> Array:
    """A new NumPy array with `array`'s type of elements."""
    if isinstance(array, np.ndarray):
        return np.empty(shape, array.dtype)
    for dtype, name in _NAMES.items():
        if name == lent.dtype:
            return np.empty(shape, dtype)
    raise TypeError(f"NumPy has no {lent.dtype} of its own to allocate; pass an array for the result")
