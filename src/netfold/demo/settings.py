"""What a training is (`Training`), and what is done with it over one backend (`Run`)."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import asdict, dataclass

SCALE = 2


@dataclass(frozen=True)
class Training:
    """Everything that decides the numbers of a training, except the order in which gradients are summed."""

    workers: int = 4
    steps: int = 200
    seed: int = 1
    patches_per_worker: int = 4
    patch_pixels: int = 24
    """Side of a low-resolution patch; its truth has SCALE times that."""
    features: int = 32
    blocks: int = 12
    learning_rate: float = 1.5e-3
    """The peak: linear over `ramp_steps`, then a half cosine down to 0 at `steps`."""
    ramp_steps: int = 20

    def __post_init__(self) -> None:
        if self.workers < 2:
            raise ValueError(
                f"workers: {self.workers}, expected 2 or more; one worker has nobody to add gradients with"
            )
        if self.steps <= self.ramp_steps:
            raise ValueError(
                f"steps: {self.steps}, expected more than the {self.ramp_steps} over which the "
                f"learning rate rises; try {2 * self.ramp_steps}"
            )

    @property
    def patches(self) -> int:
        """Patches in one step, over all workers."""
        return self.workers * self.patches_per_worker


SMALLEST = Training(workers=2, steps=120, features=16, blocks=2, patch_pixels=16)
"""The setting of `--quick`: a few seconds, still better than bicubic."""


@dataclass(frozen=True)
class Run:
    """One pass through a training: which backend adds, and which rank trains on which share."""

    name: str
    backend: str
    order: tuple[int, ...]
    """Rank r trains on share order[r] of every global batch."""
    steps: int
    """Stops after that many; the learning rate still follows the training's own number of steps."""


@dataclass(frozen=True)
class Job:
    """What a worker process is told, as one JSON argument: a training and its runs, one after the other."""

    training: Training
    runs: tuple[Run, ...]
    folder: str
    """Where the ranks meet and leave their results."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        told = json.loads(text)
        runs = tuple(Run(**{**run, "order": tuple(run["order"])}) for run in told["runs"])
        return cls(Training(**told["training"]), runs, told["folder"])


def straight(workers: int) -> tuple[int, ...]:
    """The order in which rank r takes share r."""
    return tuple(range(workers))


def permuted_orders(workers: int, count: int) -> list[tuple[int, ...]]:
    """Up to `count` different orders other than the straight one, always the same ones.

    With 2 workers there is one, and it changes no bit: a + b = b + a. From 3 on, rounding differs.
    """
    if workers <= 5:
        others = [order for order in itertools.permutations(range(workers)) if order != straight(workers)]
        return random.Random(workers).sample(others, min(count, len(others)))
    # 6 and more workers have over 700 orders; drawing beats listing, and a draw seen twice is left out.
    shuffler, orders = random.Random(workers), {straight(workers): None}
    while len(orders) <= count:
        orders[tuple(shuffler.sample(range(workers), workers))] = None
    return list(orders)[1:]
