"""What one run of the accuracy bench measures; it travels to the ranks as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

TASKS = ("images", "text")
# SwitchML's factor, as a multiple 2^k of the profiled one.
FACTORS = (-30, -28, -26, -24, -20, -10, 0, 2, 4, 6, 8, 12)


@dataclass(frozen=True)
class Settings:
    """elements: of each tensor that is summed. steps: of a training. factors: of the sweep, in powers of two."""

    ranks: int = 4
    elements: int = 1 << 18
    steps: int = 100
    seeds: Sequence[int] = (0, 1, 2)
    factors: Sequence[int] = FACTORS
    sweep_seeds: Sequence[int] = (0, 1)

    @classmethod
    def quick(cls) -> "Settings":
        """Every part once, in seconds: for tests."""
        return cls(elements=1 << 14, steps=3, seeds=(0,), factors=(-30, 0), sweep_seeds=(0,))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Settings":
        return cls(**json.loads(text))
