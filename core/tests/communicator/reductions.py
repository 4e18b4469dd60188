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
INTEGER_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")

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

    In-network with a wire: each contribution is rounded to the wire, reduced in f32, and the result rounded once; an
    average is divided behind that.
    """
    dtype, ranks = parts[0].dtype, len(parts)
    terms = [rounded(part, wire) if wire != "f32" else part for part in _terms(op, parts)]
    with np.errstate(over="ignore"):
        total = terms[0]
        for term in terms[1:]:
            total = UFUNCS[op](total, term)
        return _finished(op, rounded(total, wire) if wire != "f32" else total, ranks).astype(dtype)


def by_ring(op: str, parts: Sequence[Array], wire: str = "f32") -> Array:
    """Ring: block b is reduced from rank b up, round the ring, and rounded to the tensor's type at every hop.

    With a wire also to the wire, at every hop and once more by the owner of the finished block. The last hop divides
    an average before it rounds.
    """
    ranks, count = len(parts), len(parts[0])
    terms = _terms(op, parts)
    result = np.empty_like(parts[0])
    for block in range(ranks):
        first = count // ranks * block + min(block, count % ranks)
        where = slice(first, first + count // ranks + (1 if block < count % ranks else 0))
        total = terms[block][where]
        for step in range(1, ranks):
            own = terms[(block + step) % ranks][where]
            total = _fold(op, rounded(total, wire), own, parts[0].dtype, ranks if step == ranks - 1 else 1)
        result[where] = rounded(total, wire)
    return result


def by_ring_scatter(op: str, parts: Sequence[Array], owner: int) -> Array:
    """Ring reduce_scatter: a block is reduced from the rank after its owner, round the ring, to its owner."""
    ranks, terms = len(parts), _terms(op, parts)
    total = terms[(owner + 1) % ranks]
    for step in range(2, ranks + 1):
        own = terms[(owner + step) % ranks]
        total = _fold(op, total, own, parts[0].dtype, ranks if step == ranks else 1)
    return total.astype(parts[0].dtype)


def by_halving(op: str, parts: Sequence[Array], wire: str = "f32") -> Array:
    """Halving-doubling: the extra neighbour's first, then own + partner's, partners by ascending distance."""
    held, core = _core(op, parts, wire)
    spans = [(0, len(parts[0]))] * core
    for bit in (1 << power for power in range(core.bit_length() - 1)):
        kept = []
        for number in range(core):
            low, high = spans[number]
            middle = low + (high - low + 1) // 2
            kept.append((low, middle) if number & bit == 0 else (middle, high))
        finishes = len(parts) if bit == core // 2 else 1
        held = [
            _folded_part(op, held[n], rounded(held[n ^ bit], wire), parts[0].dtype, finishes, *kept[n])
            for n in range(core)
        ]
        spans = kept
    result = np.empty_like(parts[0])
    for number, (low, high) in enumerate(spans):
        result[low:high] = rounded(held[number][low:high], wire)
    return result


def by_halving_scatter(op: str, parts: Sequence[Array], owner: int) -> Array:
    """Recursive halving: the extra neighbour's first, then own + partner's, the farthest partner first."""
    held, core = _core(op, parts, "f32")
    extra = len(parts) - core
    bit = core // 2
    while bit:
        finishes = len(parts) if bit == 1 else 1
        held = [_fold(op, held[number], held[number ^ bit], parts[0].dtype, finishes) for number in range(core)]
        bit //= 2
    return held[owner // 2 if owner < 2 * extra else owner - extra].astype(parts[0].dtype)


def _core(op: str, parts: Sequence[Array], wire: str) -> tuple[list[Array], int]:
    """The sums of the core's ranks once the other ranks have given them their values; and the core's size."""
    ranks, terms = len(parts), _terms(op, parts)
    core = 1 << (ranks.bit_length() - 1)
    extra = ranks - core
    held = [
        _fold(op, terms[2 * number + 1], rounded(terms[2 * number], wire), parts[0].dtype)
        if number < extra
        else terms[number + extra]
        for number in range(core)
    ]
    return held, core


def by_tree(op: str, parts: Sequence[Array], wire: str = "f32", root: int = 0) -> Array:
    """Trees: own, then the children's in ascending order.

    One binomial tree for small tensors; else two binary trees on the ranks without the root, where the second one's
    numbers are mirrored or shifted by one.
    """
    ranks, terms = len(parts), _terms(op, parts)
    numbered = [terms[(root + number) % ranks] for number in range(ranks)]

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
            finishes = ranks if number == 0 and child == children(0)[-1] else 1
            value = _fold(op, value, rounded(total(children, child, where), wire), parts[0].dtype, finishes)
        return value

    if parts[0].nbytes <= 16 << 10:
        result = rounded(total(binomial, 0, slice(None)), wire)
    else:
        half = (len(parts[0]) + 1) // 2
        halves = [total(binary, 0, slice(0, half)), total(mirrored, 0, slice(half, None))]
        result = rounded(np.concatenate(halves), wire)
    return result.astype(parts[0].dtype)


def _terms(op: str, parts: Sequence[Array]) -> list[Array]:
    """The terms of a sum: f16 as f32; of an average of floats, divided by the least power of two >= the ranks."""
    wide = [part.astype(np.float32) if part.dtype == np.float16 else part for part in parts]
    if op != "avg" or wide[0].dtype.kind != "f":
        return wide
    scale = wide[0].dtype.type(0.5 ** (len(parts) - 1).bit_length())
    return [part * scale for part in wide]


def _finished(op: str, total: Array, ranks: int) -> Array:
    """Divide an average by what the terms are not divided by yet; integers toward zero."""
    if op != "avg" or ranks == 1:
        return total
    if total.dtype.kind != "f":
        wide = total.astype(np.uint64 if total.dtype.kind == "u" else np.int64)
        floor, rest = np.divmod(wide, wide.dtype.type(ranks))
        return (floor + ((rest != 0) & (total < 0))).astype(total.dtype)
    return total / total.dtype.type(ranks * 0.5 ** (ranks - 1).bit_length())


def _fold(op: str, first: Array, second: Array, dtype: Any, finishes: int = 1) -> Array:
    """Reduce two values, round to the tensor's type. finishes: the ranks, where the result is the whole average."""
    with np.errstate(over="ignore"):
        return _finished(op, UFUNCS[op](first, second), finishes).astype(dtype).astype(first.dtype)


def _folded_part(op: str, mine: Array, theirs: Array, dtype: Any, finishes: int, low: int, high: int) -> Array:
    result = mine.copy()
    result[low:high] = _fold(op, mine[low:high], theirs[low:high], dtype, finishes)
    return result
