"""A rank is stopped (SIGSTOP) inside an operation, for longer than the other rank waits.

It continues later, and changes no byte of the memory that the other rank has taken into use meanwhile.
"""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fabrics import need_libfabric
from load import Deadline, seconds
from ranks import run_ranks

import netfold
from netfold import Communicator, FileStore, Options
from netfold._native import engine

pytestmark = pytest.mark.native

COUNT = 1 << 20  # elements of f32 of each array
Arrays = list[Any]
OPERATIONS: dict[str, Callable[[Communicator, Arrays], Any]] = {
    "all_reduce": lambda group, arrays: group.all_reduce(arrays[0]),
    "reduce": lambda group, arrays: group.reduce(arrays[0], 0),
    "broadcast": lambda group, arrays: group.broadcast(arrays[0], 1),
    "all_gather": lambda group, arrays: group.all_gather(arrays[0], arrays[1:3]),
    "gather": lambda group, arrays: group.gather(arrays[0], arrays[1:3], 0),
    "scatter": lambda group, arrays: group.scatter(arrays[1:3], arrays[0], 1),
    "reduce_scatter": lambda group, arrays: group.reduce_scatter(arrays[1:3], arrays[0]),
    "all_to_all": lambda group, arrays: group.all_to_all(arrays[1:3], arrays[3:5]),
}
Row = tuple[str, str]  # an operation, and its algorithm
AUTO: list[Row] = [(operation, "auto") for operation in OPERATIONS]
BY_ALGORITHM: list[Row] = [
    *((operation, "direct") for operation in OPERATIONS),
    *((operation, "ring") for operation in ("all_reduce", "reduce_scatter", "all_gather")),
    *((operation, "halving_doubling") for operation in ("all_reduce", "reduce_scatter", "all_gather")),
    *((operation, "tree") for operation in ("all_reduce", "reduce", "broadcast", "gather", "scatter")),
    *((operation, "bruck") for operation in ("all_gather", "all_to_all")),
    ("all_to_all", "pairwise"),
    ("broadcast", "chain"),
]


def _await(place: Path) -> None:
    deadline = Deadline(30)
    while not place.exists() and deadline.left() > 0:
        time.sleep(0.005)


def _call_until_it_fails(group: Communicator, operation: str, arrays: Arrays) -> str:
    deadline = Deadline(20)
    try:
        while deadline.left() > 0:
            OPERATIONS[operation](group, arrays)
    except netfold.communicator.NetfoldError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _stopped(rank: int, size: int, folder: str, rows: list[Row], shared: bool, transport: str) -> list[str]:
    """Rank 0 stops rank 1 in each row, and returns its faults."""
    engine.set_revoke_wait(200_000_000)
    make = netfold.empty if shared else np.empty

    def filled(value: float) -> Arrays:
        arrays = [make((COUNT,), np.float32) for _ in range(5)]
        for array in arrays:
            array[:] = value
        return arrays

    faults = []
    lost: list[weakref.ref[Any]] = []
    for operation, algorithm in rows:
        place = Path(folder, operation + algorithm)
        chosen = algorithm if algorithm == "auto" else f"{operation}={algorithm}"
        options = Options(algorithm=chosen, transport=transport, probe="off")
        arrays = filled(1.0)
        with Communicator(FileStore(place), rank, size, options=options, timeout_s=seconds(20)) as group:
            other = int(group.all_gather(np.array([os.getpid()]))[1][0])
            OPERATIONS[operation](group, arrays)
            if rank == 0:
                group.group.timeout_s = 0.2
                threading.Timer(0.02, os.kill, (other, signal.SIGSTOP)).start()
            error = _call_until_it_fails(group, operation, arrays)
            if rank == 1:
                Path(place, "over").touch()
                continue
            if not error.startswith("CollectiveTimeout"):
                faults.append(f"{operation} by {algorithm}: {error}")
            lost += [weakref.ref(array) for array in arrays]
            del arrays
            gc.collect()
            arrays = filled(7.0)
            os.kill(other, signal.SIGCONT)
            _await(Path(place, "over"))
            changed = sum(int((array != 7.0).sum()) for array in arrays)
            if changed > 0:
                faults.append(f"{operation} by {algorithm}: {changed} elements of other arrays changed")
        del arrays
    # A buffer that rank 1 might have written to is given back with the first group after the end of its process.
    deadline = Deadline(10)
    while rank == 0 and any(array() is not None for array in lost):
        if deadline.left() == 0.0:
            return [*faults, "arrays of failed operations are never released"]
        with Communicator(FileStore(tempfile.mkdtemp(dir=folder)), 0, 1) as alone:
            alone.barrier()
        gc.collect()
    return faults


CASES = {
    "memory, leased": (AUTO, True, "auto", {}),
    "memory, by address": (AUTO, False, "auto", {}),
    "memory, copied": (AUTO, False, "auto", {"NETFOLD_SINGLE_COPY": "off"}),
    "sockets": (BY_ALGORITHM, False, "tcp", {}),
    "fabric": ([*AUTO, ("all_reduce", "ring")], False, "fabric:tcp", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_stopped_rank_changes_no_memory_of_another_rank_when_it_continues(case: str) -> None:
    rows, shared, transport, env = CASES[case]
    if transport.startswith("fabric"):
        need_libfabric()
    stopped = run_ranks(_stopped, 2, rows, shared, transport, env=env)
    assert stopped[0].value == [], stopped[0]
