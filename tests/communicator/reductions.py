"""The exact result of a reduction, in NumPy: by the order of summation that each algorithm states.

`parts[r]` is rank r's contribution. A *wire* is the format to which sent f32 values are rounded.
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


# By (rank, dtype), the longest contribution so far; shorter ones are prefixes. Ranks of one process share it.
_made: dict[tuple[int, str], Array] = {}
_MADE_BYTES = 256 << 20


def contribution(rank: int, count: int, dtype: str) -> Array:
    """Rank's values: distinct in every element, as far as the type has that many, with no period that could hide a
    misplaced chunk; sums of floats are inexact, so that another order of summation shows. The caller owns them."""
    found = _made.get((rank, dtype))
    if found is None or len(found) < count:
        found = _contribution(rank, count, dtype)
        if sum(array.nbytes for array in list(_made.values())) > _MADE_BYTES:
            _made.clear()
        _made[rank, dtype] = found
    return found[:count].copy()


def _contribution(rank: int, count: int, dtype: str) -> Array:
    if dtype in ("float32", "float64"):
        index = np.arange(count, dtype=np.float64)
        return (np.sqrt(index + 1 + 0.37 * rank) * (1.0 if rank % 2 == 0 else -0.7)).astype(dtype)
    # Knuth's multiplicative hash, modulo 2^32.
    mixed = np.arange(count, dtype=np.uint32) * np.uint32(2654435761) + np.uint32((rank * 40503 + 17) % 2**32)
    if dtype == "float16":
        return ((mixed % np.uint32(65521)).astype(np.float64) / 1024 - 32).astype(np.float16)
    if dtype in ("int64", "uint64"):
        return (mixed.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).astype(dtype)
    return (mixed if np.dtype(dtype).itemsize == 4 else mixed >> np.uint32(9)).astype(dtype)


def rounded(values: Array, wire: str) -> Array:
    """f32 values after rounding to `wire`: to nearest, ties to even."""
    if wire == "f32":
        return values
    if wire == "f16":
        return values.astype(np.float16).astype(np.float32)
    assert wire == "bf16" and values.dtype == np.float32
    bits = values.view(np.uint32)
    bits = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def by_rank(op: str, parts: Sequence[Array], wire: str = "f32") -> Array:
    """Direct and in-network: reduced from rank 0 up, f16 in f32 and rounded once.

    In-network with a wire: each contribution is rounded to the wire, reduced in f32, and the result rounded once.
    """
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
    """Ring: block b is reduced from rank b up, round the ring, and rounded to the tensor's type at every hop.

    With a wire also to the wire, at every hop and once more by the owner of the finished block.
    """
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


def by_ring_scatter(op: str, parts: Sequence[Array], owner: int) -> Array:
    """Ring reduce_scatter: a block is reduced from the rank after its owner, round the ring, to its owner."""
    ranks = len(parts)
    total = parts[(owner + 1) % ranks]
    for step in range(2, ranks + 1):
        total = _fold(op, total, parts[(owner + step) % ranks])
    return _average(total, ranks) if op == "avg" else total


def by_halving(op: str, parts: Sequence[Array], wire: str = "f32") -> Array:
    """Halving-doubling: the extra neighbour's first, then own + partner's, partners by ascending distance."""
    ranks = len(parts)
    core = 1 << (ranks.bit_length() - 1)
    extra = ranks - core
    held = [
        _fold(op, parts[2 * number + 1], rounded(parts[2 * number], wire)) if number < extra else parts[number + extra]
        for number in range(core)
    ]
    spans = [(0, len(parts[0]))] * core
    for bit in (1 << power for power in range(core.bit_length() - 1)):
        kept = []
        for number in range(core):
            low, high = spans[number]
            middle = low + (high - low + 1) // 2
            kept.append((low, middle) if number & bit == 0 else (middle, high))
        held = [_folded_part(op, held[n], rounded(held[n ^ bit], wire), *kept[n]) for n in range(core)]
        spans = kept
    result = np.empty_like(parts[0])
    for number, (low, high) in enumerate(spans):
        result[low:high] = rounded(held[number][low:high], wire)
    return _average(result, ranks) if op == "avg" else result


def by_halving_scatter(op: str, parts: Sequence[Array], owner: int) -> Array:
    """Recursive halving: the extra neighbour's first, then own + partner's, the farthest partner first."""
    ranks = len(parts)
    core = 1 << (ranks.bit_length() - 1)
    extra = ranks - core
    held = [
        _fold(op, parts[2 * number + 1], parts[2 * number]) if number < extra else parts[number + extra]
        for number in range(core)
    ]
    bit = core // 2
    while bit:
        held = [_fold(op, held[number], held[number ^ bit]) for number in range(core)]
        bit //= 2
    total = held[owner // 2 if owner < 2 * extra else owner - extra]
    return _average(total, ranks) if op == "avg" else total


def by_tree(op: str, parts: Sequence[Array], wire: str = "f32", root: int = 0) -> Array:
    """Trees: own, then the children's in ascending order.

    One binomial tree for small tensors; else two binary trees on the ranks without the root, where the second one's
    numbers are mirrored or shifted by one.
    """
    ranks = len(parts)
    numbered = [parts[(root + number) % ranks] for number in range(ranks)]

    def binomial(number: int) -> list[int]:
        spacing = number & -number if number else 1 << ranks.bit_length()
        return [number + (1 << power) for power in range(spacing.bit_length() - 1) if number + (1 << power) < ranks]

    def binary(number: int) -> list[int]:
        if number == 0:
            return [1 << ((ranks - 1).bit_length() - 1)] if ranks > 1 else []
        half = (number & -number) // 2
        if half == 0:
            return []
        right = half
        while right and number + right >= ranks:
            right //= 2
        return [number - half, *([number + right] if right else [])]

    def mirrored(number: int) -> list[int]:
        if ranks % 2 == 1:
            return sorted(ranks - child for child in binary(ranks - number if number else 0))
        image = 0 if number == 0 else (number - 2) % (ranks - 1) + 1
        return sorted(child % (ranks - 1) + 1 for child in binary(image))

    def total(children: Callable[[int], list[int]], number: int, where: slice) -> Array:
        value = numbered[number][where]
        for child in children(number):
            value = _fold(op, value, rounded(total(children, child, where), wire))
        return value

    if parts[0].nbytes <= 16 << 10:
        result = rounded(total(binomial, 0, slice(None)), wire)
    else:
        half = (len(parts[0]) + 1) // 2
        halves = [total(binary, 0, slice(0, half)), total(mirrored, 0, slice(half, None))]
        result = rounded(np.concatenate(halves), wire)
    return _average(result, ranks) if op == "avg" else result


def _fold(op: str, first: Array, second: Array) -> Array:
    wide = np.float32 if first.dtype == np.float16 else first.dtype
    with np.errstate(over="ignore"):
        return UFUNCS[op](first.astype(wide), second.astype(wide)).astype(first.dtype)


def _folded_part(op: str, mine: Array, theirs: Array, low: int, high: int) -> Array:
    result = mine.copy()
    result[low:high] = _fold(op, mine[low:high], theirs[low:high])
    return result


def _average(total: Array, ranks: int) -> Array:
    if total.dtype == np.float16:
        return (total.astype(np.float32) / np.float32(ranks)).astype(np.float16)
    return total / total.dtype.type(ranks)
