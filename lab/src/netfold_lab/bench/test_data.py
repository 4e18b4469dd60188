"""The values that a benchmark sends and must receive. Pure. Whole numbers: every order of reduction gives the same.

Element i of rank r in round k is c = (3 i + 5 r + k) mod p. p is a prime, so a message shifted by a chunk, a packet or
a page (all far from multiples of p) differs from itself. p is so small that the reduction over all ranks, and over any
part of them, is exact in the dtype, and in the wire format where that is narrower:

    sum          c, summed up to P (p - 1)
    avg          P c: the mean is whole, and P times the mean is still exact
    min, max     c - (p - 1) / 2: negative values too
    prod         c + 1 on rank i mod P, 1 or -1 on all other ranks: a rank that is left out or taken twice shows in half
                 of the elements or in its own, and no product is larger than p
    none         c, as for sum: values that are only moved

Sums by shared exponents (the wire format i32) are exact too: the steps in a block are 2^(e + h - 30)
(docs/explanation/numbers.md), at most 1 for numbers below 2^16 and up to 2^14 ranks. Sums by i8 are not exact, and are
checked against their bound.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from netfold_lab.bench.sizes import parse_dtype

Array: TypeAlias = "np.ndarray[Any, Any]"

_REDUCE = {"min": np.minimum, "max": np.maximum, "prod": np.multiply}
# More than any slot's or packet's element count; a greater p would only make the tables larger.
MODULUS_MAX = 65521
# Greater than the factors 3 and 5, or neighbours and ranks would not differ.
MODULUS_MIN = 7


def modulus(exact_below: int, workers: int) -> int:
    """Return the largest prime p with workers * (p - 1) < exact_below, within the bounds above. Raises ValueError."""
    candidate = min(MODULUS_MAX, (exact_below - 1) // workers + 1)
    while candidate >= MODULUS_MIN:
        if all(candidate % divisor for divisor in range(2, int(candidate**0.5) + 1)):
            return candidate
        candidate -= 1
    raise ValueError(f"sums over {workers} workers cannot be checked exactly in this dtype; take a wider one")


def contribution(rank: int, round_index: int, p: int) -> npt.NDArray[np.int64]:
    """Return one period of what `rank` sends, [p]: element i of the message is entry i mod p."""
    return (3 * np.arange(p, dtype=np.int64) + 5 * rank + round_index) % p


@dataclass(frozen=True)
class MessageData:
    """The values that the ranks send, and their reduction by `redop` (or "none"); [p] each, one period of a message."""

    redop: str
    ranks: int
    p: int

    @classmethod
    def of(cls, redop: str, ranks: int, exact_below: int) -> "MessageData":
        """Make it with the largest p that is exact. Raises ValueError where there is none."""
        match redop:
            case "min" | "max":
                p = modulus(exact_below, 1)
            case "prod":
                p = modulus(exact_below - 1, 1)
            case "avg":
                p = modulus(exact_below // ranks, ranks)
            case _:
                p = modulus(exact_below, ranks)
        return cls(redop, ranks, p)

    @property
    def largest(self) -> int:
        """The greatest magnitude that a rank sends."""
        return (self.p - 1) * (self.ranks if self.redop == "avg" else 1)

    def sent(self, rank: int, round_index: int) -> npt.NDArray[np.int64]:
        plain = contribution(rank, round_index, self.p)
        match self.redop:
            case "min" | "max":
                return plain - (self.p - 1) // 2
            case "prod":
                own = np.arange(self.p) % self.ranks == rank
                return np.where(own, plain + 1, 1 - 2 * (plain % 2))
            case "avg":
                return plain * self.ranks
            case _:
                return plain

    def reduced(self, round_index: int) -> npt.NDArray[np.int64]:
        every = np.stack([self.sent(rank, round_index) for rank in range(self.ranks)])
        whole: npt.NDArray[np.int64] = _REDUCE.get(self.redop, np.add).reduce(every)
        return whole // self.ranks if self.redop == "avg" else whole


def byte_bound(ranks: int, largest: int) -> float:
    """Return the greatest error of a sum by i8 where no rank sends more than `largest`.

    It is P m / L (docs/explanation/numbers.md), and a thousandth more for the rounding of the scale.
    """
    return 1.001 * ranks * largest / (127 // ranks)


def encode(values: npt.NDArray[np.int64], dtype: str) -> Array:
    """Return whole numbers as the dtype's elements. NumPy has no bf16: the result is then its bits, as u16."""
    if dtype == "bf16":
        # The numbers have at most 8 significant bits, so the lower half of the f32 is zero.
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(parse_dtype(dtype).torch_name)


def fill(buffer: Array, period: Array, start: int = 0) -> None:
    """Write entries `start`... of the endless message with this period into `buffer`."""
    row, body, tail = _aligned(buffer, period, start)
    body[...] = row
    tail[...] = row[: len(tail)]


def mismatches(buffer: Array, period: Array, start: int = 0, tolerance: float = 0.0) -> int:
    """Count the elements that differ from what fill() would write, by more than the tolerance (of floats only)."""
    row, body, tail = _aligned(buffer, period, start)
    return sum(_differing(part, row[: part.shape[-1]], tolerance) for part in (body, tail))


def _differing(part: Array, row: Array, tolerance: float) -> int:
    if tolerance == 0:
        return int(np.count_nonzero(part != row))
    # Count the right elements: a comparison with NaN is false, so a NaN is wrong.
    return part.size - int(np.count_nonzero(np.abs(part - row) <= tolerance))


def _aligned(buffer: Array, period: Array, start: int) -> tuple[Array, Array, Array]:
    """Return the period rotated to begin at `start`, the buffer's whole rows of it, and the rest of the buffer."""
    whole = len(buffer) - len(buffer) % len(period)
    return np.roll(period, -(start % len(period))), buffer[:whole].reshape(-1, len(period)), buffer[whole:]
