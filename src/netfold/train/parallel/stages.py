"""Cut a chain of layers into stages by the layers' costs, measured or estimated."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cut:
    """Stages, each a run of layers."""

    bounds: tuple[int, ...]
    """Stage s holds layers bounds[s]..bounds[s+1]-1."""
    costs: tuple[int, ...]
    """Of each stage, in the unit of the layers' costs."""

    def __len__(self) -> int:
        return len(self.costs)

    def layers(self, stage: int) -> range:
        return range(self.bounds[stage], self.bounds[stage + 1])

    def described(self, names: Sequence[str]) -> str:
        """The cut and its reason, in a sentence. names: of the layers."""
        total = sum(self.costs)
        parts = []
        for stage, cost in enumerate(self.costs):
            first, last = (names[self.layers(stage)[end]] for end in (0, -1))
            run = first if first == last else f"{first} to {last}"
            parts.append(f"{run} ({cost / total:.0%})" if total else run)
        over = max(self.costs) * len(self) / total - 1.0 if total else 0.0
        return (
            f"{self.bounds[-1]} layers in {len(self)} stages: {', '.join(parts)}; in brackets each stage's share of a "
            f"pass. No other cut has a smaller largest stage; it is {over:.0%} above an even share"
        )


def cut(costs: Sequence[int], stages: int) -> Cut:
    """Cut into `stages` runs of at least one layer with the smallest largest cost, exactly, by dynamic programming.

    costs: of each layer, forward and backward; integers (nanoseconds, operations), so that sums are exact.
    The slowest stage sets the pace of a pipeline. Among the best cuts, this one has the smallest sum of squares.
    Several stages on one rank are not balanced together: they are not neighbours, so the problem has no such
    recursion, and in a schedule in lockstep the largest stage decides.
    O(stages x layers^2). Raises ValueError if there are fewer layers than stages.
    """
    layers = len(costs)
    if stages > layers:
        raise ValueError(f"{stages} stages cannot be cut from {layers} layers: each needs at least one")
    before = list(itertools.accumulate(costs, initial=0))

    # largest[end]: the smallest largest stage of layers 0..end-1, in as many stages as the loop has counted.
    largest: list[float] = [float("inf"), *before[1:]]
    for _ in range(stages - 1):
        largest = [
            min((max(largest[last], before[end] - before[last]) for last in range(end)), default=float("inf"))
            for end in range(layers + 1)
        ]
    limit = largest[layers]

    # Among these cuts, the smallest sum of squares, and the begin of its last stage.
    squares: list[float] = [0.0] + [float("inf")] * layers
    begins: list[list[int]] = []
    for _ in range(stages):
        best = [
            min(
                (
                    (squares[last] + (before[end] - before[last]) ** 2, last)
                    for last in range(end)
                    if before[end] - before[last] <= limit
                ),
                default=(float("inf"), 0),
            )
            for end in range(layers + 1)
        ]
        squares = [value for value, _ in best]
        begins.append([last for _, last in best])
    bounds = [layers]
    for begin in reversed(begins):
        bounds.append(begin[bounds[-1]])
    bounds.reverse()
    return Cut(tuple(bounds), tuple(before[end] - before[first] for first, end in itertools.pairwise(bounds)))
