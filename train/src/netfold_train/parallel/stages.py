"""Cut a chain of layers into stages by the layers' costs, measured or estimated."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
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

    def best(price: Callable[[int], float], combine: Callable[[float, float], float]) -> tuple[float, tuple[int, ...]]:
        """The smallest combined price of the stages, and their bounds. price: of a stage, by its cost."""
        # found[end]: the same for layers 0..end-1, in as many stages as the loop has counted.
        found: list[tuple[float, tuple[int, ...]]] = [(0, (0,))] + [(math.inf, ())] * layers
        for _ in range(stages):
            found = [
                min(
                    (
                        (combine(value, price(before[end] - before[last])), (*bounds, end))
                        for last, (value, bounds) in enumerate(found[:end])
                    ),
                    default=(math.inf, ()),
                )
                for end in range(layers + 1)
            ]
        return found[layers]

    limit, _ = best(lambda cost: cost, max)
    _, bounds = best(lambda cost: cost**2 if cost <= limit else math.inf, operator.add)
    return Cut(bounds, tuple(before[end] - before[first] for first, end in itertools.pairwise(bounds)))
