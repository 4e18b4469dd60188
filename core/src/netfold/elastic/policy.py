"""The batch and the learning rate of a job when the number of ranks changes: pure functions.

    batch          "global": a step takes the same samples for any number of ranks, which divide them.
                   "per_rank": every rank takes as many samples as at the start; a step takes more or fewer.
    lost_samples   "repeat": if a rank is lost during a step, the ranks that are left divide the step's samples anew.
                   "skip": each of them keeps its own part; the lost parts are trained by no rank.
    learning_rate  "keep", "linear" or "sqrt": multiply the rate by 1, by the ratio of the batch to the first one (Goyal
                   et al. 2017), or by the ratio's root (Krizhevsky 2014). Under batch = "global" the ratio is 1.

A sample is named by its number in the sequence of all samples of the job. A step takes the next ones. Which example
that is, a sampler decides (by seed and number, so that it is the same on every rank).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Policy:
    """The policies of one job, the same on every rank."""

    samples: int
    """The samples of one step of the first generation, over all ranks."""
    batch: Literal["global", "per_rank"] = "global"
    lost_samples: Literal["repeat", "skip"] = "repeat"
    learning_rate: Literal["keep", "linear", "sqrt"] = "keep"

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"elastic.Policy: samples={self.samples}; a step takes at least one sample")
        for name, known in (
            ("batch", ("global", "per_rank")),
            ("lost_samples", ("repeat", "skip")),
            ("learning_rate", ("keep", "linear", "sqrt")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"elastic.Policy: {name}={getattr(self, name)!r} is not one of {', '.join(known)}")

    def step_samples(self, size: int, first_size: int) -> int:
        """The samples of a step of `size` ranks; first_size: the ranks of the first generation."""
        if self.batch == "global":
            if self.samples < size:
                raise ValueError(
                    f"elastic.Policy: {self.samples} samples do not divide among {size} ranks; take more samples, or "
                    "at most that many ranks (max_size)"
                )
            return self.samples
        return size * per_rank(self.samples, first_size)

    def factor(self, size: int, first_size: int) -> float:
        """The factor of the learning rate."""
        ratio = self.step_samples(size, first_size) / self.samples
        if self.learning_rate == "keep":
            return 1.0
        return ratio if self.learning_rate == "linear" else math.sqrt(ratio)

    def describe(self, size: int, first_size: int) -> str:
        """One sentence for people: what a step is from now on."""
        samples, factor = self.step_samples(size, first_size), self.factor(size, first_size)
        parts = [len(part(samples, rank, size)) for rank in {0, size - 1}]
        each = f"{parts[0]}" if len(set(parts)) == 1 else f"{min(parts)} or {max(parts)}"
        rate = "unchanged" if factor == 1.0 else f"multiplied by {factor:.4g} (learning_rate = {self.learning_rate!r})"
        return f"a step takes {samples} samples (batch = {self.batch!r}), {each} a rank; the learning rate is {rate}"


@dataclass(frozen=True)
class Parts:
    """The division of one step's samples."""

    ranges: tuple[range, ...]
    """By rank: numbers of samples, from 0 for the first one of the step."""

    @property
    def trained(self) -> int:
        """Samples that a rank takes; fewer than the step's under lost_samples = "skip"."""
        return sum(map(len, self.ranges))

    def weight(self, rank: int) -> float:
        """The factor of a rank's mean loss, where gradients are averaged over the ranks as if the parts were equal."""
        return len(self.ranges[rank]) * len(self.ranges) / self.trained


def part(samples: int, rank: int, size: int) -> range:
    """A rank's run of `samples`. Runs differ by at most one sample; the first ranks have the longer ones."""
    short, longer = divmod(samples, size)
    first = rank * short + min(rank, longer)
    return range(first, first + short + (rank < longer))


def divide(samples: int, size: int) -> Parts:
    """All samples of a step, each to one rank."""
    return Parts(tuple(part(samples, rank, size) for rank in range(size)))


def keep(before: Parts, former: Sequence[int]) -> Parts:
    """The parts of `before` that the ranks of a new generation had.

    former: by new rank its rank in `before`; -1 for a rank that was not in it, which takes the part of a lost rank.
    """
    gone = [each for rank, each in enumerate(before.ranges) if rank not in former]
    free = iter(gone)
    return Parts(tuple(before.ranges[rank] if rank >= 0 else next(free, range(0)) for rank in former))


def per_rank(samples: int, first_size: int) -> int:
    """A rank's samples under batch = "per_rank". Raises ValueError where the first ranks do not have equally many."""
    if samples % first_size:
        raise ValueError(
            f"elastic.Policy: {samples} samples do not divide among the {first_size} ranks of the first generation, as "
            "batch = 'per_rank' needs"
        )
    return samples // first_size
