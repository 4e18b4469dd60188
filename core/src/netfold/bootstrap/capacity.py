"""Measure what a group's switches can take, by all ranks at once, before the first operation.

Each rank reduces a few tensors through the switch as in the job, so that the switch's link is full in both directions
and its processor adds. The least time of all ranks counts, since the rank that begins last waits least. Sizes grow as
far as the time allows. The rate is from the last two sizes, since buffers pass the first bytes after a pause at once.
Rank 0 makes the table and sends it to all. Of several switches the sum is measured, and each is assumed to have an
equal part; operations then find the parts. Four hosts at 200 Mbit/s, switches behind 400 and 200 Mbit/s, 4 MB: the
first operation took 0.26 s, the second 0.24, those from the fourth on 0.21; a ring 0.27.

A process does not measure the same hosts and switches again within an hour. Operations correct the measured rates
(netfold/collective/shares.hpp).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from netfold._native import shares
from netfold.bootstrap.probe import TableChoice
from netfold.tuning import ChoiceTable, Links, Row, ring_bytes_per_s

log = logging.getLogger("netfold")

# Planned time of a measurement.
BUDGET_S = 0.05
# A measurement that takes so much longer is given up: a switch pauses, or the path is too slow to be of use.
DEADLINE_S = 2.0
# From so many bytes on a split operation measures its paths (netfold/collective/shares.hpp).
_LEARN_BYTES = 1 << 20
# An operation uses all switches from so many bytes for each (netfold/collective/sharded.hpp), else one switch.
_LEAST_PART_BYTES = 64 << 10
# The last size predicts the time of the next, so the next is at most _GROWTH times as large.
_FIRST_BYTES, _MOST_BYTES, _GROWTH = 32 << 10, 4 << 20, 4
_WARM_UP_BYTES = 4 << 10
CACHE_TTL_S = 3600.0

# Of this process, by hosts and switches: bytes per second of each switch, and when they were measured.
_cache: dict[tuple[frozenset[str], str], tuple[tuple[float, ...], float]] = {}

# Runs one operation and waits for it: kind, dtype, reduce, memory.
Run = Callable[[str, str, str, "np.ndarray[Any, Any]"], None]


def cached_rates(hosts: frozenset[str], switch: str) -> tuple[float, ...]:
    """The rate of each switch, as measured less than an hour ago; empty where none was."""
    rates, at = _cache.get((hosts, switch), ((), 0.0))
    return rates if time.monotonic() - at < CACHE_TTL_S else ()


def cache_rates(hosts: frozenset[str], switch: str, rates: tuple[float, ...]) -> None:
    """Keep the rates for the next group of this process."""
    _cache[hosts, switch] = rates, time.monotonic()


@dataclass(frozen=True)
class Measurement:
    """The outcome of a measurement, the same on every rank."""

    rates: tuple[float, ...] = ()
    """Bytes of tensor a second that each switch returns; empty where the measurement was given up."""
    why_not: str = ""
    """The reason why it was given up."""


def measure(
    run: Run, switches: int, *, budget_s: float = BUDGET_S, lost: Callable[[], str] = lambda: ""
) -> Measurement:
    """Measure how many bytes of tensor a second each of `switches` returns. Every rank calls this.

    The measurement is given up if it takes, or would take with the next size, more than DEADLINE_S and budget_s. It is
    also given up if `lost` names a lost switch on any rank, since operations then ran without that switch.
    Cost: about budget_s; more where the path is so slow that the first size takes longer. Waiting for a rank that
    begins late does not count.
    """
    clock = _Clock(run, lost, DEADLINE_S + budget_s)
    try:
        first = _FIRST_BYTES if switches == 1 else switches * _LEAST_PART_BYTES
        clock.check(first / _WARM_UP_BYTES * clock.time(_WARM_UP_BYTES), first)
        size, left_s = first, budget_s
        took_s = clock.time(size)
        rate = size / took_s
        while True:
            left_s -= took_s
            larger = min(size * _GROWTH, _MOST_BYTES)
            if larger <= size or took_s * larger / size > left_s:
                break
            larger_s = clock.time(larger)
            # The slope of the last two where they differ enough, so that latency does not count.
            rate = (larger - size) / (larger_s - took_s) if larger_s > 1.5 * took_s else larger / larger_s
            size, took_s = larger, larger_s
    except _GivenUpError as reason:
        return Measurement(why_not=str(reason))
    return Measurement((rate / switches,) * switches)


class _GivenUpError(Exception):
    """Raised on every rank at the same operation."""


class _Clock:
    """Times operations. All ranks agree on each time, so all give up at the same operation."""

    def __init__(self, run: Run, lost: Callable[[], str], deadline_s: float) -> None:
        self._run, self._lost = run, lost
        self._deadline_s = self._left_s = deadline_s

    def time(self, size: int) -> float:
        """The least time of all ranks for an all_reduce of so many bytes, in seconds."""
        values = np.zeros(size // 4, np.int32)
        began = time.perf_counter()
        self._run("all_reduce", "i32", "sum", values)
        lost = self._lost()
        agreed = np.array([time.perf_counter() - began, 0.0 if lost else 1.0])
        self._run("all_reduce", "f64", "min", agreed)
        took_s, has_switches = float(agreed[0]), bool(agreed[1])
        if not has_switches:
            raise _GivenUpError(lost or "another rank has lost a switch")
        self._left_s -= took_s
        self.check(0.0, size)
        return took_s

    def check(self, seconds: float, size: int) -> None:
        """Give up if an operation of so many seconds, or 0 for the last one, passes the deadline."""
        if not seconds <= self._left_s:
            slow = f"{size} bytes would take {seconds:.3g} s" if seconds > 0 else f"it took longer with {size} bytes"
            raise _GivenUpError(f"{slow}, and it may take {self._deadline_s:.3g} s in all")


def agree(
    run: Run,
    rank: int,
    links: Links,
    build: Callable[[Links], ChoiceTable],
    hosts: frozenset[str],
    switch: str,
    lost: Callable[[], str],
) -> TableChoice:
    """Measure the switches. Rank 0 chooses from the rates, and every rank returns rank 0's choice.

    lost: as in `measure`.
    Without usable rates rank 0 logs why. Each switch then counts as a host with a link like a rank's, and no rate is
    kept for the next group.
    """
    measurement = measure(run, switch.count(",") + 1, lost=lost)
    encoded = np.zeros(0, np.uint8)
    if rank == 0:
        links = replace(links, switches=_usable(measurement, links, switch))
        encoded = np.frombuffer(TableChoice(build(links), links).to_json(), np.uint8).copy()
    size = np.array([len(encoded)], np.int64)
    run("broadcast", "i64", "sum", size)
    if rank != 0:
        encoded = np.zeros(int(size[0]), np.uint8)
    run("broadcast", "u8", "sum", encoded)
    choice = TableChoice.from_json(encoded.tobytes())
    if choice.links.switches:
        cache_rates(hosts, switch, choice.links.switches)
    return choice


def _usable(measurement: Measurement, links: Links, switch: str) -> tuple[float, ...]:
    """The rates, capped at a rank's link, which bounds what ranks can measure. Empty and logged if there are none."""
    why_not = measurement.why_not
    if not why_not and not all(math.isfinite(rate) and rate > 0 for rate in measurement.rates):
        why_not = f"{', '.join(f'{rate:g}' for rate in measurement.rates)} bytes per second is no rate"
    if not why_not:
        return tuple(min(rate, links.network.bytes_per_s) for rate in measurement.rates)
    named = ", ".join(each.strip().partition("#")[0] for each in switch.split(","))
    log.warning(
        "rank 0: what the switch at %s takes was not measured: %s. It is taken for a host with a link like a rank's, "
        "until operations show otherwise",
        named,
        why_not,
    )
    return ()


def with_learned_split(table: ChoiceTable, hosts: int) -> ChoiceTable:
    """`table` with `split` in place of `in_network` for every large all_reduce.

    An in_network operation measures no path, so a rate that was measured too high, or a link that becomes slower, would
    slow every later operation. A split operation may also give a switch everything, and measures. Tables for two hosts
    are unchanged.
    """
    rows: list[Row] = []
    for place, row in enumerate(table.rows):
        if hosts < 3 or row.operation != "all_reduce" or "in_network" not in (row.algorithm, row.between):
            rows.append(row)
            continue
        after = table.rows[place + 1 :]
        end = min((other.min_bytes for other in after if other.operation == row.operation), default=1 << 62)
        if row.min_bytes < _LEARN_BYTES:
            rows.append(row)
        if end > _LEARN_BYTES:
            rows.append(
                replace(
                    row,
                    min_bytes=max(row.min_bytes, _LEARN_BYTES),
                    algorithm=row.algorithm.replace("in_network", "split"),
                    between=row.between.replace("in_network", "split"),
                    reason=f"{row.reason}; by split, which notices where a switch takes less",
                )
            )
    return ChoiceTable(tuple(rows))


def shares_of(links: Links, workers: int, switches: int, *, fixed: bool) -> Any:
    """The native Shares that split operations of so many workers begin with. fixed: they never change."""
    network = links.network.bytes_per_s
    each = [max(1, int(rate)) for rate in links.switches or (network / workers,) * switches]
    rates = each, int(ring_bytes_per_s(workers, network)), int(network)
    learning = shares.Shares(*rates)
    return shares.Shares(*rates, learning.balanced[:-1]) if fixed else learning


def describe_shares(current: Any) -> str:
    """A group's current split, in words. current: its native Shares."""
    parts = [f"{part / shares.WHOLE:.0%}" for part in current.balanced]
    beside = [f"{rate / 1e6:.3g}" for rate, _ in current.paths]
    alone = [f"{rate / 1e6:.3g}" for _, rate in current.paths]
    return (
        f"after {current.operations} large ones {', '.join(parts[:-1])} go through the switches, {parts[-1]} round a "
        f"ring; these do {', '.join(beside)} MB/s together, {', '.join(alone)} alone"
    )
