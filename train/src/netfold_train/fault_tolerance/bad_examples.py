"""Replace examples that cannot be read by other examples (fault_tolerance.missing_data = "skip")."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist

from netfold_train.data.examples import BadExampleError, Batch, Examples, joined
from netfold_train.data.sampler import sample_seed

# Replacements to try for one example. If none can be read, the data as a whole is gone.
TRIES = 8


class BadExampleReplacer:
    """Examples of which some cannot be read.

    The replacement is a function of the sample's seed: the same on any number of ranks, and in every run.
    """

    def __init__(self, examples: Examples, group: dist.ProcessGroup | None = None) -> None:
        """group: ranks that train on the same samples, and must use the same replacements (`agree`)."""
        self._examples, self._group = examples, group
        # The seeds of a batch -> for each sample the number of examples that could not be read before one could.
        self._attempts: dict[tuple[int, ...], list[int]] = {}
        self._messages: set[str] = set()
        # The thread that makes batches appends; the training thread pops.
        self._new_messages: deque[str] = deque()

    def __len__(self) -> int:
        return len(self._examples)

    def batch(self, indices: Sequence[int], seeds: Sequence[int]) -> Batch:
        """The batch with replacements. Raises BadExampleError if TRIES replacements of one sample fail too."""
        try:
            return self._examples.batch(indices, seeds)
        except BadExampleError:
            read = [self._one(index, seed) for index, seed in zip(indices, seeds, strict=True)]
        if self._group is not None:
            self._attempts[tuple(seeds)] = [attempt for _, attempt in read]
        return joined([each for each, _ in read])

    def agree(self, batch: Batch, indices: Sequence[int], seeds: Sequence[int]) -> Batch:
        """`batch`, which has these samples, with examples that every rank of the group can read.

        Collective over the group: one all_reduce of 8 bytes per sample, and another one as long as a rank needs a
        further replacement.
        """
        if self._group is None:
            return batch
        own = self._attempts.pop(tuple(seeds), [0] * len(seeds))
        before = [0] * len(seeds)
        while True:
            attempts = torch.tensor(own, dtype=torch.int64)
            dist.all_reduce(attempts, op=dist.ReduceOp.MAX, group=self._group)
            agreed = attempts.tolist()
            if agreed == before:
                return batch
            before = agreed
            samples = batch.parts(len(batch))
            for place, attempt in enumerate(agreed):
                if own[place] < attempt:
                    samples[place], own[place] = self._one(indices[place], seeds[place], attempt)
            batch = joined(samples)

    def new_messages(self) -> list[str]:
        """The errors since the last call, each text once per run."""
        return [self._new_messages.popleft() for _ in range(len(self._new_messages))]

    def _one(self, index: int, seed: int, first: int = 0) -> tuple[Batch, int]:
        """(the first example that can be read from attempt `first` on, its attempt). Attempt 0 is the sample's own."""
        last = BadExampleError(f"example {index} cannot be read on another rank")
        for attempt in range(first, TRIES + 1):
            chosen = sample_seed(seed, attempt - 1) % len(self._examples) if attempt else index
            try:
                batch = self._examples.batch([chosen], [seed])
            except BadExampleError as error:
                last = error
                if str(error) not in self._messages:
                    self._messages.add(str(error))
                    self._new_messages.append(str(error))
                continue
            return batch, attempt
        raise BadExampleError(f"{last}; none of {TRIES} replacements could be read either")
