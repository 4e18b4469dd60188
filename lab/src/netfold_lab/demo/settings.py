"""The settings of a training (`Training`), of a run over one backend (`Run`), and of a process (`Job`)."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import asdict, dataclass
from typing import Final

SCALE: Final = 2


@dataclass(frozen=True)
class Training:
    """Everything that determines the numbers of a training, except the order in which gradients are summed."""

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
            raise ValueError(f"workers: {self.workers}, expected 2 or more; one worker has no other gradients to add")
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
    """One run of a training: the backend, and each rank's share."""

    name: str
    backend: str
    order: tuple[int, ...]
    """Rank r trains on share order[r] of every global batch."""
    steps: int
    """The run stops after so many steps. The learning rate follows the training's number of steps."""


@dataclass(frozen=True)
class Job:
    """The argument of a worker process, as JSON: a training and its runs, one after another."""

    training: Training
    runs: tuple[Run, ...]
    folder: str
    """For the rendezvous and the results of the ranks."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        read = json.loads(text)
        runs = tuple(Run(**{**run, "order": tuple(run["order"])}) for run in read["runs"])
        return cls(Training(**read["training"]), runs, read["folder"])


def straight(workers: int) -> tuple[int, ...]:
    """The order in which rank r takes share r."""
    return tuple(range(workers))


def permuted_orders(workers: int, count: int) -> list[tuple[int, ...]]:
    """Up to `count` different orders without the straight one, the same ones in every call.

    With 2 workers there is one such order, which changes no bit: a + b = b + a. With 3 or more, rounding differs.
    """
    if workers <= 5:
        others = [order for order in itertools.permutations(range(workers)) if order != straight(workers)]
        return random.Random(workers).sample(others, min(count, len(others)))
    # 6 and more workers have 720 and more orders: draw orders instead of listing all. The dict drops repeated orders.
    shuffler, orders = random.Random(workers), {straight(workers): None}
    while len(orders) <= count:
        orders[tuple(shuffler.sample(range(workers), workers))] = None
    return list(orders)[1:]
