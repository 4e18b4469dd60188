"""Compare the rates of a group's paths in use with the rates known when the group was made.

A path is one of the group's switches, or the host algorithm beside them. Split operations measure their paths
(netfold/collective/shares.hpp). Each rank that joined a switch reads these rates five times a second. A rate that
differs by a fifth from the known one replaces it for the next group of this process, and rank 0 logs it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from netfold.bootstrap import capacity

log = logging.getLogger("netfold")

# Smallest change that counts, as a fraction of the known rate.
DRIFT = 0.2
# Least time between two log lines.
LOG_S = 60.0


class CapacityWatch:
    """Of one rank. Thread-safe: the thread of each membership calls `look`."""

    def __init__(
        self,
        shares: Callable[[], Any],
        *,
        rank: int,
        hosts: frozenset[str],
        switch: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """shares: reads the group's native Shares; None before there are any.

        hosts, switch: as in `capacity.cached_rates`.
        """
        self._shares = shares
        self._rank = rank
        self._hosts, self._switch = hosts, switch
        endpoints = (each.strip().partition("#")[0] for each in switch.split(","))
        self._names = [*(f"the switch at {each}" for each in endpoints), "the host algorithm"]
        self._clock = clock
        self._lock = threading.Lock()
        self._measured = False
        self._operations = 0
        # By path, bytes per second: the rates that the next group begins with, and the rates logged last.
        self._known: list[int] = []
        self._reported: list[int] = []
        self._reported_at = 0.0
        self._logged_at: float | None = None

    def begin(self, *, measured: bool) -> None:
        """The group's Shares exist. measured: whether their rates were measured, or assumed."""
        with self._lock:
            self._measured = measured
            self._known = self._reported = self._rates()
            self._reported_at = self._clock()

    def look(self, number: int) -> float | None:
        """Bytes of tensor a second through a switch, by its place in NETFOLD_SWITCH; None where not measured.

        Cost: a copy of the Shares, some microseconds.
        """
        with self._lock:
            if not self._known:
                return None
            shares = self._shares()
            if shares.operations != self._operations:
                self._operations = shares.operations
                self._compare(self._rates())
            if not self._measured and self._operations == 0:
                return None
            return float(shares.paths[number][1])

    def _rates(self) -> list[int]:
        """The rate of each path when it runs alone. Beside another path it has only its share of this rank's link."""
        return [alone for _, alone in self._shares().paths]

    def _compare(self, rates: list[int]) -> None:
        if drifted(self._known, rates):
            self._known = rates
            capacity.cache_rates(self._hosts, self._switch, tuple(map(float, rates[:-1])))
        now = self._clock()
        paths = drifted(self._reported, rates)
        if self._rank != 0 or not paths or (self._logged_at is not None and now - self._logged_at < LOG_S):
            return
        since = "when the group was made" if self._logged_at is None else "in the last such line"
        changes = "; ".join(
            f"{self._names[path]} {self._reported[path] / 1e6:.3g} MB/s then, {rates[path] / 1e6:.3g} now"
            for path in paths
        )
        log.info(
            "rank 0: rates of a large all_reduce drifted: %s (%.0f s ago, %s)", changes, now - self._reported_at, since
        )
        self._reported, self._reported_at, self._logged_at = rates, now, now


def drifted(before: Sequence[float], after: Sequence[float]) -> list[int]:
    """Indices of the rates that changed by more than DRIFT of the old rate."""
    return [index for index, (old, new) in enumerate(zip(before, after, strict=True)) if abs(new - old) > DRIFT * old]
