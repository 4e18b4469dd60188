"""Which example each step takes: a function of the seed and the number of samples before it, and of nothing else.

So there is nothing to save but that number, and it means the same to any number of ranks: the global batch of a step
does not depend on who computes which part of it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Sampler:
    """Every epoch goes through all examples once, in an order of its own; batches run on over its end."""

    examples: int
    seed: int

    def indices(self, first: int, count: int) -> list[int]:
        """Of the samples first..first+count-1 since the start of training."""
        found: list[int] = []
        while len(found) < count:
            epoch, offset = divmod(first + len(found), self.examples)
            found += _permutation(self.examples, self.seed, epoch)[offset : offset + count - len(found)].tolist()
        return found

    def seeds(self, first: int, count: int) -> list[int]:
        """One a sample, for what is drawn for it: the same whoever makes it, another in every epoch."""
        return [sample_seed(self.seed, sample) for sample in range(first, first + count)]


def sample_seed(seed: int, sample: int) -> int:
    """63 bits that look drawn, of the two (splitmix64's finaliser: Steele, Lea, Flood 2014)."""
    value = (seed * 0x9E3779B97F4A7C15 + sample + 1) * 0x9E3779B97F4A7C15 & _WORD
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _WORD
    return (value ^ value >> 31) >> 1


def rank_slice(total: Sequence[int], rank: int, ranks: int) -> Sequence[int]:
    """A rank's run of a batch: equal parts, in the order of ranks."""
    part = len(total) // ranks
    return total[rank * part : (rank + 1) * part]


# The last epoch's and the next one's: what a batch over an end of an epoch needs.
@functools.lru_cache(maxsize=2)
def _permutation(examples: int, seed: int, epoch: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.random.default_rng([seed, epoch]).permutation(examples)


_WORD = 2**64 - 1
