"""What a group's switches can take, measured by all of its ranks at once, before the first operation.

Each rank adds a few tensors through the switch, as it will in the job, so that the switch's link is full both ways and
its processor adds. A rank that begins late has waited least: the least time of all ranks counts. Sizes grow as far as
the time allows, and the last two count, so that what buffers let through at once after a pause is not taken for a rate.
Rank 0 makes the table of it and tells all. Of several switches the sum is measured, and each is taken for an equal part
of it: operations find the parts. Four hosts at 200 Mbit/s, switches behind 400 and 200, 4 MB: the first operation took
0.26 s, the second 0.24, those from the fourth on 0.21; a ring 0.27.

What was measured between the same hosts and switches less than an hour ago is not measured again by this process. It is
only a beginning: operations correct it (native/collective/shares.hpp).
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from netfold._native import shares
from netfold.tuning import ChoiceTable, Links, Row, ring_bytes_per_s

log = logging.getLogger("netfold")

# All of it, in seconds; the first size, and what the next may be in terms of the last, which says how long that takes.
BUDGET_S = 0.05
# So much longer, and it is given up: a switch that pauses, or a path that is too slow to be of use.
DEADLINE_S = 2.0
# From so many bytes on a split operation teaches (native/collective/split.hpp).
_LEARN_BYTES = 1 << 20
# An operation goes over all switches from so many bytes for each (native/collective/sharded.hpp); else over one.
_LEAST_PART_BYTES = 64 << 10
_FIRST_BYTES, _MOST_BYTES, _GROWTH = 32 << 10, 4 << 20, 4
_WARM_UP_BYTES = 4 << 10
CACHE_TTL_S = 3600.0

# Of this process, by the hosts and the switches: bytes a second of each switch, and when that was.
_cache: dict[tuple[frozenset[str], str], tuple[tuple[float, ...], float]] = {}

# Runs one operation to its end: kind, dtype, reduce, memory.
Run = Callable[[str, str, str, "np.ndarray[Any, Any]"], None]


def cached_rates(hosts: frozenset[str], switch: str) -> tuple[float, ...]:
    """What was measured there less than an hour ago, of each switch; empty where nothing was."""
    rates, at = _cache.get((hosts, switch), ((), 0.0))
    return rates if time.monotonic() - at < CACHE_TTL_S else ()


def cache_rates(hosts: frozenset[str], switch: str, rates: tuple[float, ...]) -> None:
    """What the next group of this process begins with there."""
    _cache[hosts, switch] = rates, time.monotonic()


@dataclass(frozen=True)
class Measurement:
    """What a measurement found, the same on every rank."""

    rates: tuple[float, ...] = ()
    """Bytes of tensor a second that each switch gives back; empty where it was given up."""
    why_not: str = ""
    """Why it was given up."""


def measure(
    run: Run, switches: int, *, budget_s: float = BUDGET_S, lost: Callable[[], str] = lambda: ""
) -> Measurement:
    """Bytes of tensor a second that each of `switches` gives back. Every rank calls it, and gets the same.

    Costs about budget_s, more where the path is so slow that the first size takes longer. It is given up once it has
    taken DEADLINE_S and budget_s, or would with the next size, and where `lost` says on any rank that a switch is gone:
    an operation that went another way says nothing of a switch. A rank that is late costs none of that time.
    """
    clock = _Clock(run, lost, DEADLINE_S + budget_s)
    try:
        first = _FIRST_BYTES if switches == 1 else switches * _LEAST_PART_BYTES
        clock.expect(first / _WARM_UP_BYTES * clock.time(_WARM_UP_BYTES), first)
        size, left_s = first, budget_s
        took_s = clock.time(size)
        rate = size / took_s
        while True:
            left_s -= took_s
            larger = min(size * _GROWTH, _MOST_BYTES)
            if larger <= size or took_s * larger / size > left_s:
                break
            larger_s = clock.time(larger)
            # A line through the last two, where there is one: what comes before the first byte is no rate.
            rate = (larger - size) / (larger_s - took_s) if larger_s > 1.5 * took_s else larger / larger_s
            size, took_s = larger, larger_s
    except _GivenUpError as reason:
        return Measurement(why_not=str(reason))
    return Measurement((rate / switches,) * switches)


class _GivenUpError(Exception):
    """Raised on every rank at once."""


class _Clock:
    """Times operations, and gives up on every rank alike: by what all of them agreed on after each."""

    def __init__(self, run: Run, lost: Callable[[], str], deadline_s: float) -> None:
        self._run, self._lost = run, lost
        self._deadline_s = self._left_s = deadline_s

    def time(self, size: int) -> float:
        """Seconds of an all_reduce of so many bytes, of the rank that waited least."""
        values = np.zeros(size // 4, np.int32)
        began = time.perf_counter()
        self._run("all_reduce", "i32", "sum", values)
        lost = self._lost()
        said = np.array([time.perf_counter() - began, 0.0 if lost else 1.0])
        self._run("all_reduce", "f64", "min", said)
        took_s, is_whole = float(said[0]), bool(said[1])
        if not is_whole:
            raise _GivenUpError(lost or "another rank has lost a switch")
        self._left_s -= took_s
        self.expect(0.0, size)
        return took_s

    def expect(self, seconds: float, size: int) -> None:
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
) -> tuple[ChoiceTable, Links]:
    """Measure the switches; rank 0 decides by what that says, and every rank returns what it decided.

    lost: as in `measure`. Where nothing usable was measured, rank 0 logs why, each switch is taken for a host with a
    link like a rank's, and nothing is kept for the next group.
    """
    found = measure(run, switch.count(",") + 1, lost=lost)
    said = np.zeros(0, np.uint8)
    if rank == 0:
        links = replace(links, switches=_usable(found, links, switch))
        text = json.dumps({"table": build(links).to_json(), "links": links.to_json()}).encode()
        said = np.frombuffer(text, np.uint8).copy()
    size = np.array([len(said)], np.int64)
    run("broadcast", "i64", "sum", size)
    if rank != 0:
        said = np.zeros(int(size[0]), np.uint8)
    run("broadcast", "u8", "sum", said)
    parts = json.loads(said.tobytes())
    table, links = ChoiceTable.from_json(parts["table"]), Links.from_json(parts["links"])
    if links.switches:
        cache_rates(hosts, switch, links.switches)
    return table, links


def _usable(found: Measurement, links: Links, switch: str) -> tuple[float, ...]:
    """The rates, a rank's link at most, beyond which no rank can see; empty, with a line in the log, for no rates."""
    why_not = found.why_not
    if not why_not and not all(math.isfinite(rate) and rate > 0 for rate in found.rates):
        why_not = f"{', '.join(f'{rate:g}' for rate in found.rates)} bytes a second is no rate"
    if not why_not:
        return tuple(min(rate, links.network.bytes_per_s) for rate in found.rates)
    named = ", ".join(each.strip().partition("#")[0] for each in switch.split(","))
    log.warning(
        "rank 0: what the switch at %s takes was not measured: %s. It is taken for a host with a link like a rank's, "
        "until operations show otherwise",
        named,
        why_not,
    )
    return ()


def with_learned_split(table: ChoiceTable, hosts: int) -> ChoiceTable:
    """`table` with every large all_reduce that goes through the switches alone split instead.

    What goes through a switch alone teaches nothing: a rate that was measured too high, or a link that shrinks, would
    cost every operation to come. A split one gives a switch all of it, too, and notices. Between two hosts nothing is.
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
    """What split operations of so many workers begin with, or, where it is `fixed`, stay with."""
    network = links.network.bytes_per_s
    each = [max(1, int(rate)) for rate in links.switches or (network / workers,) * switches]
    rates = each, int(ring_bytes_per_s(workers, network)), int(network)
    found = shares.Shares(*rates)
    return shares.Shares(*rates, found.balanced[:-1]) if fixed else found


def describe_shares(said: Any) -> str:
    """Where a group's split stands, in words. `said`: its native Shares."""
    parts = [f"{part / shares.WHOLE:.0%}" for part in said.balanced]
    beside = [f"{rate / 1e6:.3g}" for rate, _ in said.paths]
    alone = [f"{rate / 1e6:.3g}" for _, rate in said.paths]
    return (
        f"after {said.operations} large ones {', '.join(parts[:-1])} go through the switches, {parts[-1]} round a "
        f"ring; these do {', '.join(beside)} MB/s together, {', '.join(alone)} alone"
    )
