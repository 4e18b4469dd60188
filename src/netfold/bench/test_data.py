"""The values a benchmark sends and what must arrive. Pure; whole numbers, so any order of reducing agrees.

Element i of rank r in round k is c = (3 i + 5 r + k) mod p. p is a prime, so that a message shifted by a chunk,
a packet or a page (all far from multiples of p) does not look like itself; and so small that what the reduction makes
of all ranks' numbers, and of any part of them, is exact in the dtype, and in the wire format where that is narrower:

    sum          c, summed up to P (p - 1)
    avg          P c: the mean is whole, and P times it still exact
    min, max     c - (p - 1) / 2: negative ones too
    prod         c + 1 on rank i mod P, 1 or -1 on all others: a rank left out or taken twice shows in half of the
                 elements or in its own, and no product is larger than p
    none         c, as for sum: what is only moved

Sums by shared exponents (the wire format i32) are exact too: its steps in a block are 2^(e + h - 30)
(docs/explanation/numbers.md),
at most 1 for numbers below 2^16 and up to 2^14 ranks. By i8 they are not, and are checked against their bound.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = "np.ndarray[Any, Any]"

_REDUCE = {"min": np.minimum, "max": np.maximum, "prod": np.multiply}
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


@dataclass(frozen=True)
class MessageData:
    """What the ranks send, and what `redop` (or "none") must make of it; [p] each, one period of a message."""

    redop: str
    ranks: int
    p: int

    @classmethod
    def of(cls, redop: str, ranks: int, exact_below: int) -> "MessageData":
        """With the largest p that is exact; ValueError where there is none."""
        match redop:
            case "min" | "max":
                return cls(redop, ranks, modulus(exact_below, 1))
            case "prod":
                return cls(redop, ranks, modulus(exact_below - 1, 1))
            case "avg":
                return cls(redop, ranks, modulus(exact_below // ranks, ranks))
            case _:
                return cls(redop, ranks, modulus(exact_below, ranks))

    @property
    def largest(self) -> int:
        """No rank sends a greater magnitude."""
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
    """How far a sum by i8 may be off where no rank sends more than `largest`: P m / L (docs/explanation/numbers.md),
    and a
    thousandth for what the scale's own rounding adds."""
    return 1.001 * ranks * largest / (127 // ranks)


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


def mismatches(buffer: Array, period: Array, start: int = 0, tolerance: float = 0.0) -> int:
    """How many elements are not what fill() would write; with a tolerance, of floats, further than that from it."""
    row, body, tail = _aligned(buffer, period, start)
    return sum(_differing(part, row[: part.shape[-1]], tolerance) for part in (body, tail))


def _differing(part: Array, row: Array, tolerance: float) -> int:
    if tolerance == 0:
        return int(np.count_nonzero(part != row))
    # A NaN is no nearer than the tolerance, nor further.
    return part.size - int(np.count_nonzero(np.abs(part - row) <= tolerance))


def _aligned(buffer: Array, period: Array, start: int) -> tuple[Array, Array, Array]:
    """The period turned to begin at `start`, the buffer as whole rows of it, and what is left."""
    whole = len(buffer) - len(buffer) % len(period)
    return np.roll(period, -(start % len(period))), buffer[:whole].reshape(-1, len(period)), buffer[whole:]
