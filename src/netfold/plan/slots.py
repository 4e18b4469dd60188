"""Schedules and reductions counted by hand: slots of a pipeline, steps and bytes of an all-reduce.

The formulas of NVIDIA's talk on scaling out (Hot Chips 2020), for models whose layers all take the same time. What
`netfold.plan.step` predicts for such a model has the same parts; a test says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Slots:
    """A pipeline of `stages` ranks and `microbatches`; a slot is one rank's pass, either way, over one microbatch."""

    stages: int
    microbatches: int = 1

    @property
    def steps(self) -> int:
        """Until the last backward pass has ended."""
        return 2 * (self.stages + self.microbatches - 1)

    @property
    def total(self) -> int:
        return self.stages * self.steps

    @property
    def idle(self) -> int:
        return 2 * self.stages * (self.stages - 1)

    @property
    def idle_part(self) -> Fraction:
        """(N-1)/(N+K-1); without microbatches (N-1)/N."""
        return Fraction(self.idle, self.total)


@dataclass(frozen=True)
class Reduction:
    """An all-reduce of n bytes. steps: that follow on each other; synchronisations: waits for others; sent_part: of n,
    what a rank sends in all of them."""

    steps: int
    synchronisations: int
    sent_part: Fraction


def ring(ranks: int) -> Reduction:
    """2(N-1) steps of n/N bytes, each to one neighbour, each waited for."""
    return Reduction(2 * (ranks - 1), 2 * (ranks - 1), Fraction(2 * (ranks - 1), ranks))


def one_shot(ranks: int) -> Reduction:
    """Two steps of N-1 messages of n/N bytes, one to each other rank; two waits."""
    return Reduction(2, 2, Fraction(2 * (ranks - 1), ranks))
