"""Where a chain of layers is cut into stages: a function of what each layer costs, measured or estimated."""

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
    """Of each stage, in the unit that layers' were given in."""

    def __len__(self) -> int:
        return len(self.costs)

    def layers(self, stage: int) -> range:
        return range(self.bounds[stage], self.bounds[stage + 1])

    def described(self, names: Sequence[str]) -> str:
        """The cut and why it is this one, in a sentence. `names` are the layers'."""
        total = sum(self.costs)
        parts = []
        for stage, cost in enumerate(self.costs):
            first, last = (names[self.layers(stage)[end]] for end in (0, -1))
            run = first if first == last else f"{first} to {last}"
            parts.append(f"{run} ({cost / total:.0%})" if total else run)
        over = max(self.costs) * len(self) / total - 1.0 if total else 0.0
        return (
            f"{self.bounds[-1]} layers in {len(self)} stages: {', '.join(parts)}; in brackets what each costs of a "
            f"pass. No other cut has a smaller largest stage; it is {over:.0%} above an even share"
        )


def cut(costs: Sequence[int], stages: int) -> Cut:
    """The cut into `stages` runs of one layer or more whose largest cost is smallest: exactly, by dynamic programming.

    costs: of each layer, forward and backward; integers (nanoseconds, operations), so that sums are exact.
    A pipeline goes at the pace of its slowest stage. Of all cuts that are best in this, it is the one whose stages are
    most even (smallest sum of squares). Where a rank holds several stages, its sum is at most so many times the largest
    stage; to find the smallest such sum is another problem, which does not fall into parts (stages of a rank are not
    neighbours), and in a schedule that goes in step it would not be what counts.
    O(stages x layers^2). ValueError if there are fewer layers than stages.
    """
    layers = len(costs)
    if stages > layers:
        raise ValueError(f"{stages} stages cannot be cut from {layers} layers: each takes one or more")
    before = list(itertools.accumulate(costs, initial=0))

    # The smallest largest stage, of layers 0..end-1 in `count` stages.
    largest: list[float] = [float("inf"), *before[1:]]
    for _ in range(stages - 1):
        largest = [
            min((max(largest[last], before[end] - before[last]) for last in range(end)), default=float("inf"))
            for end in range(layers + 1)
        ]
    limit = largest[layers]

    # Among those cuts, the smallest sum of squares, and where its last stage begins.
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
