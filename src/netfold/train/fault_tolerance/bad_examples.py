"""Another example in place of one that cannot be read (fault_tolerance.missing_data = "skip")."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist

from netfold.train.examples import BadExampleError, Batch, Examples
from netfold.train.sampler import sample_seed

# So many others are tried for one: where all of them cannot be read, the data is gone as a whole.
TRIES = 8


class BadExampleReplacer:
    """Examples of which some may have vanished.

    Which one is taken instead is a function of the sample's seed: the same on any number of ranks, and in every run.
    """

    def __init__(self, examples: Examples, group: dist.ProcessGroup | None = None) -> None:
        """group: ranks that train on the same samples, and must take the same ones in place of those that one of them
        cannot read (`agree`)."""
        self._examples, self._group = examples, group
        # seeds of a batch -> for each sample how many examples could not be read before the one that was
        self._attempts: dict[tuple[int, ...], list[int]] = {}
        self._said: dict[str, None] = {}
        # Written by the thread that makes batches, read by the one that trains.
        self._untold: deque[str] = deque()
        self.replaced = 0
        """Samples so far, on this rank."""

    def __len__(self) -> int:
        return len(self._examples)

    def batch(self, indices: Sequence[int], seeds: Sequence[int]) -> Batch:
        """As the examples' own; raises BadExampleError where TRIES others cannot be read either."""
        try:
            return self._examples.batch(indices, seeds)
        except BadExampleError:
            read = [self._one(index, seed) for index, seed in zip(indices, seeds, strict=True)]
        if self._group is not None:
            self._attempts[tuple(seeds)] = [attempt for _, attempt in read]
        return _joined([each for each, _ in read])

    def agree(self, batch: Batch, indices: Sequence[int], seeds: Sequence[int]) -> Batch:
        """`batch`, which has these samples, with those examples that every rank of the group could read.

        Collective over the group: one all_reduce of 8 bytes a sample where all could read all; else one more for each
        time that a rank cannot read what another took instead.
        """
        if self._group is None:
            return batch
        own = self._attempts.pop(tuple(seeds), [0] * len(seeds))
        before = [0] * len(seeds)
        while True:
            told = torch.tensor(own, dtype=torch.int64)
            dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self._group)
            agreed = told.tolist()
            if agreed == before:
                return batch
            before = agreed
            samples = batch.parts(len(batch))
            for place, attempt in enumerate(agreed):
                if own[place] < attempt:
                    samples[place], own[place] = self._one(indices[place], seeds[place], attempt)
            batch = _joined(samples)

    def new_messages(self) -> list[str]:
        """What cannot be read, each said once."""
        return [self._untold.popleft() for _ in range(len(self._untold))]

    def _one(self, index: int, seed: int, first: int = 0) -> tuple[Batch, int]:
        """The first example that can be read, of the sample's own and those in its place, from attempt `first` on; and
        which attempt that was."""
        last = BadExampleError(f"example {index} cannot be read on another rank")
        for attempt in range(first, TRIES + 1):
            # The first is the sample's own; each other follows from its seed.
            chosen = sample_seed(seed, attempt - 1) % len(self._examples) if attempt else index
            try:
                batch = self._examples.batch([chosen], [seed])
            except BadExampleError as error:
                self._say(str(error))
                last = error
                continue
            self.replaced += attempt > 0
            return batch, attempt
        raise BadExampleError(f"{last}; nor could any of {TRIES} others be read that were taken in its place")

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said[text] = None
            self._untold.append(text)


def _joined(samples: Sequence[Batch]) -> Batch:
    columns = zip(*((*each.inputs, each.target) for each in samples), strict=True)
    tensors = [torch.cat(column) for column in columns]
    return Batch(tuple(tensors[:-1]), tensors[-1])
