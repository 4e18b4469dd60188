"""The memory of an array, and the native dtype of its elements.

NumPy arrays are used directly, other arrays by DLPack or the buffer protocol, both without a copy. A complex number is
sent as its two parts, a bf16 of ml_dtypes as itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from netfold._native import arrays
from netfold.communicator.group import REDUCE_OPS, Region, region

Array: TypeAlias = "np.ndarray[Any, Any]"

# Looked up by equality, so that the other byte order is not found. NumPy's codes count bytes.
_NAMES: dict[Any, str] = {
    np.dtype("bool" if name == "bool" else f"{name[0]}{int(name[1:]) // 8}"): name
    for name in (
        *("f32", "f64", "f16", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64"),
        *("bool", "c64", "c128"),
    )
}

# NumPy's operators for bools. They read any byte but 0 as true, and write 0 and 1.
_BOOL_OPS = ("product", "min", "max", "band", "bor", "bxor")

OPS = ("avg", *(op for op in REDUCE_OPS if not op.endswith("_loc")))


class ArrayView(NamedTuple):
    """An array's memory, valid as long as this object lives."""

    region: Region
    dtype: str  # f32 ... u64, bool, c64, c128
    shape: tuple[int, ...]
    owner: Any

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def rows(self, counts: Sequence[int]) -> list[Region]:
        """The memory, cut along the first axis into parts of so many rows."""
        address, total_bytes = self.region
        rows = self.shape[0] if self.shape else 1
        row_bytes = total_bytes // rows if rows else 0
        out = []
        for count in counts:
            out.append((address, count * row_bytes))
            address += count * row_bytes
        return out


def array_view(array: Any, *, writable: bool) -> ArrayView:
    """View the memory of `array`. TypeError or ValueError, as a sentence, where that is impossible."""
    if not isinstance(array, np.ndarray):
        exported = arrays.ExportedArray(array, writable)
        return ArrayView((exported.address, exported.bytes), exported.dtype, exported.shape, exported)
    # The dtype object belongs to ml_dtypes: without that package NumPy has no name for it.
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


def reduction(kind: str, dtype: str, op: str | None) -> tuple[str, bool]:
    """(operator, whether to average) for native code. op: None where values only move."""
    if op is None:
        return "sum", False
    if op not in OPS:
        raise ValueError(f"{kind}: no operator {op!r}; there are {', '.join(OPS)}")
    if dtype == "bool" and op not in _BOOL_OPS:
        raise ValueError(
            f"{kind}: {op} is not defined for bool; there are {', '.join(_BOOL_OPS)} (max is any, min all)"
        )
    if dtype in ("c64", "c128") and op not in ("sum", "avg"):
        raise ValueError(f"{kind}: {op} is not defined for complex numbers; there are sum and avg")
    return "sum" if op == "avg" else op, op == "avg"


def empty_like(view: ArrayView, array: Any, shape: tuple[int, ...]) -> Array:
    """A new NumPy array with the dtype of `array`, whose view is `view`."""
    if isinstance(array, np.ndarray):
        return np.empty(shape, array.dtype)
    for dtype, name in _NAMES.items():
        if name == view.dtype:
            return np.empty(shape, dtype)
    raise TypeError(f"NumPy has no {view.dtype} of its own to allocate; pass an array for the result")
