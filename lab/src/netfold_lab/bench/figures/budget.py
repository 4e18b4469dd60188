"""The time of all figures together, divided into the shares of figures and their parts."""

import time
from collections.abc import Callable, Iterator, Sequence

# Fewer rounds have no spread; these rounds run regardless of the time.
LEAST_ROUNDS = 3
MOST_ROUNDS = 30

Clock = Callable[[], float]


class Share:
    """A time that begins now. rounds_played: of the last `rounds`."""

    def __init__(self, seconds: float, clock: Clock = time.monotonic) -> None:
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

    def split(self, weights: Sequence[int]) -> Iterator["Share"]:
        """Yield shares one after another, each by its weight. Time that one does not use goes to the next ones."""
        for at, weight in enumerate(weights):
            yield Share(max(0.0, self.left_s) * weight / sum(weights[at:]), self._clock)
