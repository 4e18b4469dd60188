"""A sampler that knows which examples of the epoch were used."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sized
from typing import Any

import torch.utils.data

from netfold.horovod.torch.world import rank, size


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Deals the examples of an epoch out to the ranks, without those that were used before the last reset.

    Put it into the `TorchState`, call `record_batch` after each batch, and `set_epoch` at the end of each epoch.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        """seed: the same on every rank."""
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: all examples again, in another order."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Every rank has used so many examples more."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Deal out what is left of the epoch anew."""
        self.num_replicas, self.rank = size(), rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        # The first examples once more, so that every rank has as many.
        padded = self.remaining_indices + self.remaining_indices[: self.total_size - len(self.remaining_indices)]
        return iter(padded[self.rank : self.total_size : self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
