"""Large reductions and broadcasts on one host by address, beside the same through slots:

    .venv/bin/python lab/bench/by_address.py

Both sides are groups of the same processes; one has NETFOLD_SINGLE_COPY=off, and so uses slots. Sides take turns. A
call's time is the slowest rank's, its processor time that of all ranks, and every result is checked.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import driver
import numpy as np
from driver import Place, Rank, cell, take_turns

SIDES = ("on", "off")  # NETFOLD_SINGLE_COPY
MB = 1 << 20
CASES = (
    ("all_reduce", 1),
    ("all_reduce", 4),
    ("all_reduce", 64),
    ("reduce_scatter", 64),
    ("broadcast", 4),
    ("broadcast", 64),
)


def serve(me: Rank) -> None:
    groups = {side: me.communicator(side, single_copy=side) for side in SIDES}

    def run(side: str, operation: str, size_mb: int, calls: int) -> list[tuple[float, float]]:
        group = groups[side]
        values = np.empty(size_mb * MB // 4, np.float32)
        result, due = values, me.size * (me.size + 1) // 2
        call: Callable[[], Any] = lambda: group.all_reduce(values)
        if operation == "reduce_scatter":
            result = values[: len(values) // me.size].copy()
            call = lambda: group.reduce_scatter(values, result)
        if operation == "broadcast":
            due = 1
            call = lambda: group.broadcast(values)
        found = []
        for _ in range(calls):
            values.fill(me.rank + 1)
            me.line.cross()
            began, cpu = time.perf_counter(), time.process_time()
            call()
            found.append((time.perf_counter() - began, time.process_time() - cpu))
            assert (result == due).all(), f"{side}: {operation} of {size_mb} MB is wrong"
        return found

    me.serve(run)


def a_round(answers: list[list[tuple[float, float]]]) -> Any:
    """The median call's seconds, of the slowest rank, and its processor seconds, of all ranks."""
    of_calls = np.array(answers)  # by rank, call, and kind of time
    return np.median(of_calls[..., 0].max(0)), np.median(of_calls[..., 1].sum(0))


def by_address(rounds: int = 10, launches: int = 3, ranks: str = "2,4,8") -> str:
    """Large reductions and broadcasts by address."""
    rows = []
    for size in map(int, ranks.split(",")):
        ratios: dict[tuple[str, int], list[Any]] = {case: [] for case in CASES}
        for _ in range(launches):
            with driver.ranks_at(Place(size), serve) as job:
                for case in CASES:
                    calls = 10 if case[1] < 16 else 2
                    turns = take_turns(SIDES, rounds, lambda side: a_round(job.ask(side, *case, calls)))  # noqa: B023
                    ratios[case] += list(np.divide(turns["off"], turns["on"]))
        for (operation, size_mb), found in ratios.items():
            wall, processor = np.array(found).T
            rows.append([size, operation, f"{size_mb} MB", cell(wall), cell(processor)])
    head = "ranks | operation | size | time | processor time"
    return f"""Through slots over by address: above 1, by address is faster. Medians of {rounds} rounds in each of
{launches} launches, 5% .. 95%; f32, plain tensors, one host.

{driver.table(head, rows)}"""


if __name__ == "__main__":
    driver.run(by_address)
