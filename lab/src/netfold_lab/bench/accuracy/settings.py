"""The settings of one run of the accuracy benchmark."""

from collections.abc import Sequence
from dataclasses import dataclass

TASKS = ("images", "text")
# SwitchML's factor, as a multiple 2^k of the profiled one.
FACTORS = (-30, -28, -26, -24, -20, -10, 0, 2, 4, 6, 8, 12)


@dataclass(frozen=True)
class Settings:
    ranks: int = 4
    elements: int = 1 << 18  # of each tensor that is summed
    steps: int = 100  # of a training
    seeds: Sequence[int] = (0, 1, 2)
    factors: Sequence[int] = FACTORS  # of the sweep, in powers of two
    sweep_seeds: Sequence[int] = (0, 1)

    @classmethod
    def quick(cls) -> "Settings":
        """Return settings that run every part once, in seconds: for tests."""
        return cls(elements=1 << 14, steps=3, seeds=(0,), factors=(-30, 0), sweep_seeds=(0,))
