"""What a cluster does that closed forms leave out: jitter, stragglers, shared links, computing slowed by messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Conditions:
    """jitter: how much what a rank computes between two waits for others varies, its standard deviation by its mean.

    seed: of the jitter; the same seed gives the same step. stragglers: by rank, how many times as long it computes.
    contention: messages that meet on a link share it. interference: how many times as long a pass takes while gradients
    are under way beside it; a collective's kernels and a matmul's want the same cores and memory.
    """

    jitter: float = 0.0
    seed: int = 0
    stragglers: Mapping[int, float] = field(default_factory=dict)
    contention: bool = True
    interference: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.jitter < float("inf"):
            raise ValueError(f"jitter is a ratio of 0 or more, not {self.jitter:g}")
        if not 1 <= self.interference < float("inf"):
            raise ValueError(f"interference is 1 (none) or more, not {self.interference:g}")
        for rank, factor in self.stragglers.items():
            if not 0 < factor < float("inf"):
                raise ValueError(f"rank {rank} cannot compute {factor:g} times as long; 1 is as long as the others")

    @property
    def symmetric(self) -> bool:
        """Whether ranks at the same place of the mesh do the same at the same time."""
        return self.jitter == 0 and not self.stragglers


IDEAL = Conditions(contention=False)
