"""The values a benchmark sends and what must arrive. Pure; whole numbers, so any order of adding agrees.

Element i of rank r in round k is (3 i + 5 r + k) mod p. p is a prime, so that a message shifted by a chunk,
a packet or a page (all far from multiples of p) does not look like itself; and so small that the sum over
all ranks is exact in the dtype.
"""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = "np.ndarray[Any, Any]"

# Above any slot's or packet's element count; more would only make the tables larger.
MODULUS_MAX = 65521
# Above the pattern's own factors, or neighbours and ranks would not differ.
MODULUS_MIN = 7


def modulus(exact_below: int, workers: int) -> int:
    """The largest prime p with workers * (p - 1) < exact_below, within the bounds above."""
    candidate = min(MODULUS_MAX, (exact_below - 1) // workers + 1)
    while candidate >= MODULUS_MIN:
        if all(candidate % divisor for divisor in range(2, int(candidate**0.5) + 1)):
            return candidate
        candidate -= 1
    raise ValueError(f"sums over {workers} workers cannot be checked exactly in this dtype; take a wider one")


def contribution(rank: int, round_index: int, p: int) -> npt.NDArray[np.int64]:
    """One period of what `rank` sends, [p]: element i of the message is entry i mod p."""
    return (3 * np.arange(p, dtype=np.int64) + 5 * rank + round_index) % p


def expected_sum(workers: int, round_index: int, p: int) -> npt.NDArray[np.int64]:
    """One period of the sum over all workers, [p]."""
    return sum((contribution(rank, round_index, p) for rank in range(workers)), np.zeros(p, dtype=np.int64))


def encode(values: npt.NDArray[np.int64], dtype: str) -> Array:
    """Whole numbers as the dtype's elements; bf16, which NumPy lacks, as the 16 bits that torch reads as one."""
    if dtype == "bf16":
        # The pattern's numbers have 8 significant bits at most, so the lower half of the f32 is zero.
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    names = {"f32": "float32", "f64": "float64", "f16": "float16", "i32": "int32", "i64": "int64"}
    return values.astype(names[dtype])


def fill(buffer: Array, period: Array, start: int = 0) -> None:
    """Write entries `start`... of the endless message with this period into `buffer`."""
    row, body, tail = _aligned(buffer, period, start)
    body[...] = row
    tail[...] = row[: len(tail)]


def mismatches(buffer: Array, period: Array, start: int = 0) -> int:
    """How many elements are not what fill() would write."""
    row, body, tail = _aligned(buffer, period, start)
    return int(np.count_nonzero(body != row)) + int(np.count_nonzero(tail != row[: len(tail)]))


def _aligned(buffer: Array, period: Array, start: int) -> tuple[Array, Array, Array]:
    """The period turned to begin at `start`, the buffer as whole rows of it, and what is left."""
    whole = len(buffer) - len(buffer) % len(period)
    return np.roll(period, -(start % len(period))), buffer[:whole].reshape(-1, len(period)), buffer[whole:]
