"""What a group's ways do in use, against what was known when the group was made.

A way is one of the group's switches, or the host algorithm beside them. Operations that are split measure their ways
(native/collective/shares.hpp). Each rank that joined a switch looks at these rates five times a second. A rate that
differs by a fifth from the one known so far is the rate that the next group of this process begins with, and rank 0
logs it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from netfold.bootstrap import capacity

log = logging.getLogger("netfold")

# Of the rate known so far.
DRIFT = 0.2
# Between two lines in the log.
LOG_S = 60.0


class CapacityWatch:
    """Of one rank. Thread-safe: the thread of each of its memberships looks.

    shares: a reading of the group's native Shares, None before there are any. ends, switch: as in
    `capacity.cached_rates`.
    """

    def __init__(
        self,
        shares: Callable[[], Any],
        *,
        rank: int,
        ends: frozenset[str],
        switch: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shares = shares
        self._rank = rank
        self._ends, self._switch = ends, switch
        endpoints = (each.strip().partition("#")[0] for each in switch.split(","))
        self._names = [*(f"the switch at {each}" for each in endpoints), "the host algorithm"]
        self._clock = clock
        self._lock = threading.Lock()
        self._measured = False
        self._operations = 0
        # By way, bytes a second: what the next group begins with, and what was said last, and when.
        self._known: list[int] = []
        self._said: list[int] = []
        self._said_at = 0.0
        self._logged_at: float | None = None

    def begin(self, *, measured: bool) -> None:
        """The group's Shares are made, of rates that were `measured`, or are assumed."""
        with self._lock:
            self._measured = measured
            self._known = self._said = self._rates()
            self._said_at = self._clock()

    def look(self, number: int) -> float | None:
        """Bytes of tensor a second through a switch, by its place in NETFOLD_SWITCH; None where nobody measured it.

        Cost: a copy of the Shares, some microseconds.
        """
        with self._lock:
            if not self._known:
                return None
            found = self._shares()
            if found.operations != self._operations:
                self._operations = found.operations
                self._compare(self._rates())
            if not self._measured and self._operations == 0:
                return None
            return float(found.paths[number][1])

    def _rates(self) -> list[int]:
        """Of each way alone: beside another one it has as much of this rank's link as the cut gives it."""
        return [alone for _, alone in self._shares().paths]

    def _compare(self, rates: list[int]) -> None:
        if drifted(self._known, rates):
            self._known = rates
            capacity.cache_rates(self._ends, self._switch, tuple(map(float, rates[:-1])))
        now = self._clock()
        ways = drifted(self._said, rates)
        if self._rank != 0 or not ways or (self._logged_at is not None and now - self._logged_at < LOG_S):
            return
        since = "when the group was made" if self._logged_at is None else "in the last such line"
        changes = "; ".join(
            f"{self._names[way]} {self._said[way] / 1e6:.3g} MB/s then, {rates[way] / 1e6:.3g} now" for way in ways
        )
        log.info(
            "rank 0: rates of a large all_reduce drifted: %s (%.0f s ago, %s)", changes, now - self._said_at, since
        )
        self._said, self._said_at, self._logged_at = rates, now, now


def drifted(before: Sequence[float], after: Sequence[float]) -> list[int]:
    """Places of the rates that differ from those before by more than DRIFT of them."""
    return [place for place, (old, new) in enumerate(zip(before, after, strict=True)) if abs(new - old) > DRIFT * old]
