"""Effects that closed forms leave out: jitter, stragglers, shared links, computing slowed by communication."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Conditions:
    """jitter: the standard deviation of a rank's computing between two waits, over its mean.

    seed: of the jitter; the same seed gives the same step.
    stragglers: by rank, how many times as long it computes.
    contention: messages that meet on a link share it.
    interference: how many times as long a pass takes while gradients are reduced: the kernels of a collective and of a
    matmul use the same cores and memory.
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
                raise ValueError(f"rank {rank} cannot compute {factor:g} times as long; 1 is no straggler")

    @property
    def symmetric(self) -> bool:
        """Whether all replicas of a stage do the same at the same time."""
        return self.jitter == 0 and not self.stragglers


IDEAL = Conditions(contention=False)
