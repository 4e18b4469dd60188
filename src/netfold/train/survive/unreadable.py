"""Another example in place of one that cannot be read (survive.missing_data = "skip")."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from netfold.train.examples import Batch, Examples, UnreadableError
from netfold.train.order import sample_seed

# So many others are tried for one: where all of them cannot be read, the data is gone as a whole.
TRIES = 8


class Replacing:
    """Examples of which some may have vanished.

    Which one is taken instead is a function of the sample's seed: the same on any number of ranks, and in every run.
    """

    def __init__(self, examples: Examples) -> None:
        self._examples = examples
        self._said: dict[str, None] = {}
        # Written by the thread that makes batches, read by the one that trains.
        self._untold: deque[str] = deque()
        self.replaced = 0
        """Samples so far, on this rank."""

    def __len__(self) -> int:
        return len(self._examples)

    def batch(self, indices: Sequence[int], seeds: Sequence[int]) -> Batch:
        """As the examples' own; raises UnreadableError where TRIES others cannot be read either."""
        try:
            return self._examples.batch(indices, seeds)
        except UnreadableError:
            single = [self._one(index, seed) for index, seed in zip(indices, seeds, strict=True)]
        columns = zip(*((*each.inputs, each.target) for each in single), strict=True)
        tensors = [torch.cat(column) for column in columns]
        return Batch(tuple(tensors[:-1]), tensors[-1])

    def news(self) -> list[str]:
        """What cannot be read, each said once."""
        return [self._untold.popleft() for _ in range(len(self._untold))]

    def _one(self, index: int, seed: int) -> Batch:
        for attempt in range(TRIES + 1):
            try:
                batch = self._examples.batch([index], [seed])
            except UnreadableError as error:
                self._say(str(error))
                last = error
                index = sample_seed(seed, attempt) % len(self._examples)
                continue
            self.replaced += attempt > 0
            return batch
        raise UnreadableError(f"{last}; nor could any of {TRIES} others be read that were taken in its place")

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said[text] = None
            self._untold.append(text)
