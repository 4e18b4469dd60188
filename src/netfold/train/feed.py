"""A rank's batches, one step ahead, made in a thread of their own."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from netfold.train.examples import Batch, Examples
from netfold.train.order import Order, share


class Feed:
    """The share of one data-parallel rank in each global batch of `batch` samples.

    Which samples is `Order`'s to say: they depend on the samples before, and not on the number of ranks.
    """

    def __init__(self, examples: Examples, seed: int, batch: int, rank: int, ranks: int) -> None:
        self._examples = examples
        self._order = Order(len(examples), seed)
        self._batch, self._rank, self._ranks = batch, rank, ranks
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="netfold-feed")
        self._ahead: tuple[int, Future[Batch]] | None = None

    def get(self, samples: int) -> Batch:
        """The share in the batch that comes after `samples` samples; the next one is begun. Raises UnreadableError."""
        ahead, self._ahead = self._ahead, None
        future = ahead[1] if ahead is not None and ahead[0] == samples else self._begin(samples)
        batch = future.result()
        self._ahead = samples + self._batch, self._begin(samples + self._batch)
        return batch

    def __enter__(self) -> Feed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _begin(self, samples: int) -> Future[Batch]:
        return self._thread.submit(self._make, samples)

    def _make(self, samples: int) -> Batch:
        indices = share(self._order.indices(samples, self._batch), self._rank, self._ranks)
        seeds = share(self._order.seeds(samples, self._batch), self._rank, self._ranks)
        return self._examples.batch(indices, seeds)
