"""What a reduction must give, to the last bit: the order of summation that each algorithm states, in NumPy.

`parts[r]` is rank r's contribution. A *wire* is what f32 values are rounded to while they travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, Any]"

UFUNCS: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "avg": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
FLOAT_OPS = ("sum", "avg", "product", "min", "max")
INTEGER_OPS = ("sum", "product", "min", "max", "band", "bor", "bxor")

# Unit roundoff of a format with p significant bits is 2^-p, rounding to nearest.
UNIT_ROUNDOFF = {"f32": 2.0**-24, "bf16": 2.0**-8, "f16": 2.0**-11}


def contribution(rank: int, count: int, dtype: str) -> Array:
    """Rank's values: distinct in every element, as far as the type has that many, with no period that could hide a
    misplaced chunk; sums of floats are inexact, so that another order of summation shows."""
    index = np.arange(count, dtype=np.float64)
    if dtype in ("float32", "float64"):
        return (np.sqrt(index + 1 + 0.37 * rank) * (1.0 if rank % 2 == 0 else -0.7)).astype(dtype)
    # Knuth's multiplicative hash.
    mixed = (np.arange(count, dtype=np.uint64) * np.uint64(2654435761) + np.uint64(rank * 40503 + 17)) % np.uint64(
        2**32
    )
    if dtype == "float16":
        return ((mixed % np.uint64(65521)).astype(np.float64) / 1024 - 32).astype(np.float16)
    if dtype in ("int64", "uint64"):
        return (mixed * np.uint64(0x9E3779B97F4A7C15)).astype(dtype)
    return (mixed if np.dtype(dtype).itemsize == 4 else mixed >> np.uint64(9)).astype(dtype)


def rounded(values: Array, wire: str) -> Array:
    """f32 values after a trip in `wire`: to nearest, ties to even."""
    if wire == "f32":
        return values
    if wire == "f16":
        return values.astype(np.float16).astype(np.float32)
    assert wire == "bf16" and values.dtype == np.float32
    bits = values.view(np.uint32)
    bits = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def by_rank(op: str, parts: Sequence[Array], wire: str = "f32") -> Array:
    """Direct and in-network: folded from rank 0 up, f16 in f32 and rounded once. In-network with a wire: each
    contribution is rounded to it, folded in f32, and the result rounded once."""
    dtype = parts[0].dtype
    wide = np.float32 if dtype == np.float16 else dtype
    parts = [rounded(part, wire) if wire != "f32" else part.astype(wide) for part in parts]
    with np.errstate(over="ignore"):
        total = parts[0].copy()
        for part in parts[1:]:
            total = UFUNCS[op](total, part)
        total = rounded(total, wire) if wire != "f32" else total.astype(dtype)
        return _average(total, len(parts)) if op == "avg" else total


def by_ring(op: str, parts: Sequence[Array], wire: str = "f32") -> Array:
    """Ring: block b is folded from rank b up, round the ring, and rounded to the tensor's type at every hop; with a
    wire also to that, at every hop and once more by the owner of the finished block."""
    ranks, count = len(parts), len(parts[0])
    dtype = parts[0].dtype
    wide = np.float32 if dtype == np.float16 else dtype
    result = np.empty_like(parts[0])
    with np.errstate(over="ignore"):
        for block in range(ranks):
            first = count // ranks * block + min(block, count % ranks)
            where = slice(first, first + count // ranks + (1 if block < count % ranks else 0))
            total = parts[block][where]
            for step in range(1, ranks):
                arrived = rounded(total, wire) if wire != "f32" else total
                own = parts[(block + step) % ranks][where]
                total = UFUNCS[op](arrived.astype(wide), own.astype(wide)).astype(dtype)
            result[where] = rounded(total, wire) if wire != "f32" else total
        return _average(result, ranks) if op == "avg" else result


def _average(total: Array, ranks: int) -> Array:
    if total.dtype == np.float16:
        return (total.astype(np.float32) / np.float32(ranks)).astype(np.float16)
    return total / total.dtype.type(ranks)
