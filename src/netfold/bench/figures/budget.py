"""The time of all figures together, and each figure's share of it."""

import time
from collections.abc import Callable, Iterator, Mapping

# Fewer rounds have no spread; these rounds run regardless of the time.
LEAST_ROUNDS = 3
MOST_ROUNDS = 30

Clock = Callable[[], float]


class Share:
    """One figure's time, which begins now. rounds_played: of the last `rounds`."""

    def __init__(self, seconds: float, clock: Clock) -> None:
        self._clock = clock
        self._end = clock() + seconds
        self.rounds_played = 0

    @property
    def left_s(self) -> float:
        return self._end - self._clock()

    def rounds(self, most: int = MOST_ROUNDS) -> Iterator[int]:
        """Yield -1 for the warm-up, then 0, 1, ... until `most`, or until another round would not fit."""
        self.rounds_played, longest_s = 0, 0.0
        for number in range(-1, most):
            if number >= LEAST_ROUNDS and longest_s > self.left_s:
                return
            began = self._clock()
            yield number
            longest_s = max(longest_s, self._clock() - began)
            self.rounds_played = number + 1

    def split(self, parts: int) -> Iterator["Share"]:
        """Yield shares one after another; time that one does not use goes to the next ones."""
        for left in range(parts, 0, -1):
            yield Share(self.left_s / left, self._clock)


class Budget:
    """`total_s`, divided by `weights` in order: time that a figure does not use goes to the next figures."""

    def __init__(self, total_s: float, weights: Mapping[str, int], clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + total_s
        self._weights = dict(weights)

    def begin(self, name: str) -> Share:
        """The share of the next figure, which begins now."""
        part = self._weights[name] / sum(self._weights.values())
        del self._weights[name]
        return Share(max(0.0, self._end - self._clock()) * part, self._clock)
