"""A rank's batches, one step ahead, made in a thread of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from netfold.train.examples import Batch, Examples
from netfold.train.sampler import Sampler, rank_slice


class Prefetcher:
    """The share of one data-parallel rank in each global batch of `batch` samples.

    Which samples is `Sampler`'s to say: they depend on the samples before, and not on the number of ranks.
    """

    def __init__(
        self,
        examples: Examples,
        seed: int,
        batch: int,
        rank: int,
        ranks: int,
        agree: Callable[[Batch, Sequence[int], Sequence[int]], Batch] | None = None,
    ) -> None:
        """agree: (a batch, its indices and seeds) -> the batch to train on; called by `get`, on its thread."""
        self._examples = examples
        self._order = Sampler(len(examples), seed)
        self._batch, self._rank, self._ranks, self._agree = batch, rank, ranks, agree
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="netfold-feed")
        self._ahead: tuple[int, Future[Batch]] | None = None

    def get(self, samples: int) -> Batch:
        """The share in the batch that comes after `samples` samples; the next one is begun. Raises BadExampleError."""
        ahead, self._ahead = self._ahead, None
        future = ahead[1] if ahead is not None and ahead[0] == samples else self._begin(samples)
        batch = future.result()
        self._ahead = samples + self._batch, self._begin(samples + self._batch)
        return batch if self._agree is None else self._agree(batch, *self._numbers(samples))

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _begin(self, samples: int) -> Future[Batch]:
        return self._thread.submit(self._make, samples)

    def _make(self, samples: int) -> Batch:
        return self._examples.batch(*self._numbers(samples))

    def _numbers(self, samples: int) -> tuple[Sequence[int], Sequence[int]]:
        """The share's indices and seeds."""
        indices = rank_slice(self._order.indices(samples, self._batch), self._rank, self._ranks)
        return indices, rank_slice(self._order.seeds(samples, self._batch), self._rank, self._ranks)
