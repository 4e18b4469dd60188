"""Large collectives on one host beside plain copies of as many bytes, the limit that the memory sets:

    .venv/bin/python lab/bench/memory_bound.py

A collective must at least read n bytes and write n bytes on every rank that gets n. A copy of n bytes between two
private buffers does that and nothing else. So in turns with the collective, every rank that gets n bytes copies n
bytes, all ranks at once, with plain stores and with streaming stores; the faster kind counts. Every result is checked.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import driver
import numpy as np
from driver import Place, Rank, cell, take_turns

from netfold import _native

MB = 1 << 20
SIDES = ("collective", "plain copy", "streaming copy")
OPERATIONS = ("all_reduce", "all_gather", "all_to_all", "broadcast")


def serve(me: Rank) -> None:
    group = me.communicator("bound")

    def run(side: str, operation: str, size_mb: int, calls: int) -> list[float]:
        given, taken = np.empty(size_mb * MB // 4, np.float32), np.empty(size_mb * MB // 4, np.float32)
        part = given[: len(given) // me.size]
        call: Callable[[], Any] = {
            "all_reduce": lambda: group.all_reduce(taken),
            "all_gather": lambda: group.all_gather(part, taken),
            "all_to_all": lambda: group.all_to_all(given, taken),
            "broadcast": lambda: group.broadcast(taken),
        }[operation]
        if side != "collective":
            from_, to = given.view(np.uint8), taken.view(np.uint8)
            call = lambda: _native.kernels.copy(to, from_, side == "streaming copy")
            if operation == "broadcast" and me.rank == 0:
                call = lambda: None
        seconds = []
        for _ in range(calls):
            given.fill(me.rank + 1)
            taken.fill(me.rank + 1)
            me.line.cross()
            began = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - began)
            assert side != "collective" or is_right(operation, taken, me.size), f"{operation} of {size_mb} MB is wrong"
        return seconds

    me.serve(run)


def is_right(operation: str, taken: Any, size: int) -> bool:
    if operation in ("all_gather", "all_to_all"):
        return all((block == rank + 1).all() for rank, block in enumerate(taken.reshape(size, -1)))
    return bool((taken == (1 if operation == "broadcast" else size * (size + 1) // 2)).all())


def memory_bound(rounds: int = 10, launches: int = 3, ranks: str = "2,4,8", sizes_mb: str = "1,64") -> str:
    """Large collectives beside plain copies."""
    rows = []
    cases = [(operation, int(size_mb)) for size_mb in sizes_mb.split(",") for operation in OPERATIONS]
    for size in map(int, ranks.split(",")):
        ratios: dict[tuple[str, int], list[Any]] = {case: [] for case in cases}
        for _ in range(launches):
            with driver.ranks_at(Place(size), serve) as job:
                for case in cases:
                    calls = 10 if case[1] < 16 else 2
                    ask = lambda side: np.median(driver.slowest(job.ask(side, *case, calls)))  # noqa: B023
                    turns = take_turns(SIDES, rounds, ask)
                    bound = np.minimum(turns["plain copy"], turns["streaming copy"])
                    ratios[case] += list(np.divide(turns["collective"], bound))
        rows += [[size, operation, f"{size_mb} MB", cell(found)] for (operation, size_mb), found in ratios.items()]
    return f"""The collective's time over the copy's: 1 is the limit of the memory. Medians of {rounds} rounds in each
of {launches} launches, 5% .. 95%; f32, plain tensors, one host; the slowest rank's time.

{driver.table("ranks | operation | n | time over a copy's", rows)}"""


if __name__ == "__main__":
    driver.run(memory_bound)
