"""Choose the examples of each step, and make a rank's batches one step ahead.

The choice is a function of the seed and the number of samples before the step. So a checkpoint needs only that number,
which has the same meaning for any number of ranks: the global batch of a step does not depend on its division.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from netfold.elastic.policy import part
from netfold_train.data.examples import Batch, Examples

_WORD = 2**64 - 1


@dataclass(frozen=True)
class Sampler:
    """Every epoch takes all examples once, in its own order; a batch may cross the end of an epoch."""

    examples: int
    seed: int

    def indices(self, first: int, count: int) -> list[int]:
        """The examples of samples first..first+count-1 since the start of training."""
        found: list[int] = []
        while len(found) < count:
            epoch, offset = divmod(first + len(found), self.examples)
            found += _permutation(self.examples, self.seed, epoch)[offset : offset + count - len(found)].tolist()
        return found

    def seeds(self, first: int, count: int) -> list[int]:
        """One seed for each sample's random choices: the same on any rank, different in every epoch."""
        return [sample_seed(self.seed, sample) for sample in range(first, first + count)]


def sample_seed(seed: int, sample: int) -> int:
    """A hash of both in 63 bits (splitmix64's finaliser: Steele, Lea, Flood 2014)."""
    value = (seed * 0x9E3779B97F4A7C15 + sample + 1) * 0x9E3779B97F4A7C15 & _WORD
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _WORD
    return (value ^ value >> 31) >> 1


# Two: a batch over the end of an epoch needs the orders of both epochs.
@functools.lru_cache(maxsize=2)
def _permutation(examples: int, seed: int, epoch: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.random.default_rng([seed, epoch]).permutation(examples)


class Prefetcher:
    """One data-parallel rank's share of each global batch of `batch` samples: a run of them, in the order of ranks.

    Shares are equal if `ranks` divides the batch; else the first ranks have one sample more.
    """

    def __init__(
        self,
        examples: Examples,
        seed: int,
        batch: int,
        rank: int,
        ranks: int,
        agree: Callable[[Batch, Sequence[int], Sequence[int]], Batch] | None = None,
        *,
        pin: bool = False,
    ) -> None:
        """agree: (a batch, its indices and seeds) -> the batch to train on; `get` calls it on the caller's thread.

        pin: batches are in pinned memory, for a GPU.
        """
        self._pin = pin
        self._examples, self._sampler, self._agree = examples, Sampler(len(examples), seed), agree
        self._batch, self._share = batch, part(batch, rank, ranks)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="netfold-feed")
        self._ahead: dict[int, Future[Batch]] = {}

    def get(self, samples: int) -> Batch:
        """The share of the batch after `samples` samples; also begins the next one. Raises BadExampleError."""
        ahead = self._ahead.pop(samples, None) or self._begin(samples)
        batch = ahead.result()
        self._ahead = {samples + self._batch: self._begin(samples + self._batch)}
        return batch if self._agree is None else self._agree(batch, *self._numbers(samples))

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _begin(self, samples: int) -> Future[Batch]:
        return self._thread.submit(self._made, samples)

    def _made(self, samples: int) -> Batch:
        batch = self._examples.batch(*self._numbers(samples))
        return batch.pinned() if self._pin else batch

    def _numbers(self, samples: int) -> tuple[list[int], list[int]]:
        """The share's indices and seeds."""
        first, count = samples + self._share.start, len(self._share)
        return self._sampler.indices(first, count), self._sampler.seeds(first, count)
