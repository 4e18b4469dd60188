"""The values a benchmark sends and what their sum must be. Pure; whole numbers, so any order of adding agrees.

Element i of rank r in round k is (3 i + 5 r + k) mod p. p is a prime, so that a message shifted by a chunk,
a packet or a page (all far from multiples of p) does not look like itself; and so small that the sum over
all ranks is exact in the dtype.
"""

import numpy as np
import numpy.typing as npt

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
