"""What a group's switches can take, measured by all of its ranks at once, before the first operation.

Each rank adds a few tensors through the switch, as it will in the job, so that the switch's link is full both ways and
its processor adds. A rank that begins late has waited least: the least time of all ranks counts. Sizes grow as far as
the time allows, and the last two count, so that what buffers let through at once after a pause is not taken for a rate.
Rank 0 makes the table of it and tells all.

What was measured between the same hosts and switches less than an hour ago is not measured again by this process. It is
only a beginning: operations correct it (native/collective/shares.hpp).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from netfold._native import shares
from netfold.plan import ChoiceTable, Links, ring_bytes_per_s

# All of it, in seconds; the first size, and what the next may be in terms of the last, which says how long that takes.
BUDGET_S = 0.05
_FIRST_BYTES, _MOST_BYTES, _GROWTH = 32 << 10, 4 << 20, 4
_WARM_UP_BYTES = 4 << 10
KEPT_S = 3600.0

# Of this process, by the hosts and the switches: bytes a second of each switch, and when that was.
_known: dict[tuple[frozenset[str], str], tuple[tuple[float, ...], float]] = {}

# Runs one operation to its end: kind, dtype, reduce, memory.
Run = Callable[[str, str, str, "np.ndarray[Any, Any]"], None]


def known(hosts: frozenset[str], switch: str) -> tuple[float, ...]:
    """What was measured there less than an hour ago, of each switch; empty where nothing was."""
    rates, at = _known.get((hosts, switch), ((), 0.0))
    return rates if time.monotonic() - at < KEPT_S else ()


def remember(hosts: frozenset[str], switch: str, rates: tuple[float, ...]) -> None:
    """What the next group of this process begins with there."""
    _known[hosts, switch] = rates, time.monotonic()


def measure(run: Run, switches: int) -> tuple[float, ...]:
    """Bytes of tensor a second that each of `switches` gives back. Every rank calls it, and gets the same.

    Costs about BUDGET_S, more where the path is so slow that the first size takes longer.
    """
    _timed(run, _WARM_UP_BYTES)
    size, left_s = _FIRST_BYTES, BUDGET_S
    took_s = _timed(run, size)
    rate = size / took_s
    while True:
        left_s -= took_s
        larger = min(size * _GROWTH, _MOST_BYTES)
        if larger == size or took_s * larger / size > left_s:
            return (rate / switches,) * switches
        larger_s = _timed(run, larger)
        # A line through the last two, where there is one: what comes before the first byte is no rate.
        rate = (larger - size) / (larger_s - took_s) if larger_s > 1.5 * took_s else larger / larger_s
        size, took_s = larger, larger_s


def _timed(run: Run, size: int) -> float:
    """Seconds of an all_reduce of so many bytes, of the rank that waited least."""
    values = np.zeros(size // 4, np.int32)
    began = time.perf_counter()
    run("all_reduce", "i32", "sum", values)
    took = np.array([time.perf_counter() - began])
    run("all_reduce", "f64", "min", took)
    return float(took[0])


def agree(
    run: Run, rank: int, links: Links, build: Callable[[Links], ChoiceTable], hosts: frozenset[str], switch: str
) -> tuple[ChoiceTable, Links]:
    """Measure the switches; rank 0 decides by what that says, and every rank returns what it decided."""
    links = replace(links, switches=measure(run, switch.count(",") + 1))
    said = np.zeros(0, np.uint8)
    if rank == 0:
        text = json.dumps({"table": build(links).to_json(), "links": links.to_json()}).encode()
        said = np.frombuffer(text, np.uint8).copy()
    size = np.array([len(said)], np.int64)
    run("broadcast", "i64", "sum", size)
    if rank != 0:
        said = np.zeros(int(size[0]), np.uint8)
    run("broadcast", "u8", "sum", said)
    parts = json.loads(said.tobytes())
    table, links = ChoiceTable.from_json(parts["table"]), Links.from_json(parts["links"])
    remember(hosts, switch, links.switches)
    return table, links


def shares_of(links: Links, workers: int, switches: int, *, fixed: bool) -> Any:
    """What split operations of so many workers begin with, or, where it is `fixed`, stay with."""
    network = links.network.bytes_per_s
    each = [max(1, int(rate)) for rate in links.switches or (network / workers,) * switches]
    rates = each, int(ring_bytes_per_s(workers, network)), int(network)
    found = shares.Shares(*rates)
    return shares.Shares(*rates, found.balanced[:-1]) if fixed else found


def text(said: Any) -> str:
    """Where a group's split stands, in words. `said`: its native Shares."""
    parts = [f"{part / shares.WHOLE:.0%}" for part in said.balanced]
    beside = [f"{rate / 1e6:.3g}" for rate, _ in said.ways]
    alone = [f"{rate / 1e6:.3g}" for _, rate in said.ways]
    return (
        f"after {said.operations} large ones {', '.join(parts[:-1])} go through the switches, {parts[-1]} round a "
        f"ring; these do {', '.join(beside)} MB/s together, {', '.join(alone)} alone"
    )
