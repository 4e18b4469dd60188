"""A rank gave up in a call: a rank that makes the call later gets that rank's reason, and no value."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hosts import apart
from load import seconds
from ranks import Outcome, run_ranks

from netfold import Communicator, FileStore, Options

pytestmark = pytest.mark.native

# All that the late rank, the last one, needs is in place: the other ranks have sent their parts before rank 0 gives up.
OPERATIONS: dict[str, Callable[[Communicator, Any], Any]] = {
    "all_reduce": lambda group, array: group.all_reduce(array),
    "reduce": lambda group, array: group.reduce(array, 0),
    "broadcast": lambda group, array: group.broadcast(array, group.size - 1),
    "all_gather": lambda group, array: group.all_gather(array),
    "gather": lambda group, array: group.gather(array, root=0),
    "scatter": lambda group, array: group.scatter([array] * group.size, np.zeros_like(array), group.size - 1),
    "reduce_scatter": lambda group, array: group.reduce_scatter([array] * group.size),
    "all_to_all": lambda group, array: group.all_to_all(
        [array] * group.size, [np.zeros_like(array) for _ in range(group.size)]
    ),
    "barrier": lambda group, array: group.barrier(),
}
ALGORITHMS = {
    "direct": list(OPERATIONS),
    "ring": ["all_reduce", "reduce_scatter", "all_gather"],
    "halving_doubling": ["all_reduce", "reduce_scatter", "all_gather"],
    "tree": ["all_reduce", "reduce", "broadcast", "gather", "scatter"],
    "bruck": ["all_gather", "all_to_all", "barrier"],
    "pairwise": ["all_to_all"],
    "chain": ["broadcast"],
}
ROOTED = ("reduce", "broadcast", "gather", "scatter")
Row = tuple[str, str]  # an operation, and its algorithm


def _one_gives_up(
    rank: int, size: int, folder: str, way: str, elements: int, rows: list[Row], transport: str
) -> dict[Row, str]:
    """Return each row's end on this rank. Rank 0 gives up; the last rank calls later, ranks between call at once."""
    if transport == "tcp":
        setattr(*apart(tuple(range(size))))  # connections that can be made again, as between hosts
    ends = {}
    for row in rows:
        operation, algorithm = row
        place = Path(folder, operation + algorithm)
        chosen = algorithm if algorithm == "auto" else f"{operation}={algorithm}"
        options = Options(algorithm=chosen, transport=transport, probe="off")
        with Communicator(FileStore(place), rank, size, options=options, timeout_s=60.0) as group:
            group.barrier()
            array = np.full(elements, float(rank + 1), np.float32)
            if rank == 0:
                if way == "timeout":
                    group.group.timeout_s = 0.2
                else:
                    threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
            until = time.monotonic() + seconds(30)
            while rank == size - 1 and not Path(place, "gave up").exists() and time.monotonic() < until:
                time.sleep(0.01)
            try:
                OPERATIONS[operation](group, array)
                ends[row] = "no error"
            except BaseException as error:
                ends[row] = type(error).__name__
            if rank == 0:
                Path(place, "gave up").touch()
            if rank == size - 1:
                Path(place, "over").touch()
            while not Path(place, "over").exists() and time.monotonic() < until:
                time.sleep(0.01)
    return ends


ENDS = {"timeout": "CollectiveTimeout", "KeyboardInterrupt": "KeyboardInterrupt"}


def _check(outcomes: list[Outcome], way: str, rows: list[Row]) -> None:
    assert outcomes[0].value == dict.fromkeys(rows, ENDS[way]), outcomes[0]
    assert outcomes[-1].value == dict.fromkeys(rows, "PeerLost"), outcomes[-1]
    for between in outcomes[1:-1]:
        # A rank between the two may have all that it needs where a root sends or receives; elsewhere it needs the late
        # rank.
        waits = {row: end for row, end in between.value.items() if row[0] not in ROOTED}
        assert waits == dict.fromkeys(waits, "PeerLost"), between


@pytest.mark.parametrize("elements", [1, 1 << 18])
@pytest.mark.parametrize("way", ENDS)
def test_a_late_rank_in_memory_learns_that_another_rank_gave_up(way: str, elements: int) -> None:
    rows = [(operation, "auto") for operation in OPERATIONS]
    _check(run_ranks(_one_gives_up, 2, way, elements, rows, "auto"), way, rows)


# 1 << 14: a few chunks of the algorithms that send in chunks, which the kernel takes whole.
@pytest.mark.parametrize("elements", [1, 1 << 14])
def test_a_late_rank_over_sockets_learns_that_another_rank_gave_up(elements: int) -> None:
    rows = [(operation, algorithm) for algorithm, operations in ALGORITHMS.items() for operation in operations]
    _check(run_ranks(_one_gives_up, 3, "timeout", elements, rows, "tcp"), "timeout", rows)


def test_a_late_rank_over_sockets_learns_that_another_rank_was_interrupted() -> None:
    rows = [(operation, "direct") for operation in ("all_reduce", "reduce", "barrier")]
    _check(run_ranks(_one_gives_up, 2, "KeyboardInterrupt", 1, rows, "tcp"), "KeyboardInterrupt", rows)
