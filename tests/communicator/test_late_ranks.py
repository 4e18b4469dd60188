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
from load import seconds
from ranks import run_ranks

from netfold import Communicator, FileStore, Options

pytestmark = pytest.mark.native

# With all that the late rank needs in place: rank 0 has sent its part before it gives up.
OPERATIONS: dict[str, Callable[[Communicator, Any], Any]] = {
    "all_reduce": lambda group, array: group.all_reduce(array),
    "reduce": lambda group, array: group.reduce(array, 0),
    "broadcast": lambda group, array: group.broadcast(array, 1),
    "all_gather": lambda group, array: group.all_gather(array),
    "gather": lambda group, array: group.gather(array, root=0),
    "scatter": lambda group, array: group.scatter([array] * group.size, np.zeros_like(array), 1),
    "reduce_scatter": lambda group, array: group.reduce_scatter([array] * group.size),
    "all_to_all": lambda group, array: group.all_to_all(
        [array] * group.size, [np.zeros_like(array) for _ in range(group.size)]
    ),
    "barrier": lambda group, array: group.barrier(),
}


def _one_gives_up(rank: int, size: int, folder: str, way: str, elements: int, options: Options) -> list[str]:
    found = []
    for name, call in OPERATIONS.items():
        place = Path(folder, name)
        with Communicator(FileStore(place), rank, size, options=options, timeout_s=60.0) as group:
            group.barrier()
            array = np.full(elements, float(rank + 1), np.float32)
            if rank == 0:
                if way == "timeout":
                    group.group.timeout_s = 0.3
                else:
                    threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
                try:
                    call(group, array)
                except BaseException as error:
                    found.append(f"{name}: {type(error).__name__}")
                Path(place, "gave up").touch()
                while not Path(place, "over").exists():
                    time.sleep(0.01)
                continue
            until = time.monotonic() + seconds(30)
            while not Path(place, "gave up").exists() and time.monotonic() < until:
                time.sleep(0.01)
            try:
                call(group, array)
                found.append(f"{name}: no error")
            except Exception as error:
                found.append(f"{name}: {type(error).__name__}")
            Path(place, "over").touch()
    return found


@pytest.mark.parametrize("elements", [1, 1 << 18])
@pytest.mark.parametrize("way", ["timeout", "KeyboardInterrupt"])
def test_a_late_rank_in_memory_learns_that_another_rank_gave_up(way: str, elements: int) -> None:
    gave_up, late = run_ranks(_one_gives_up, 2, way, elements, Options())
    ends = {"timeout": "CollectiveTimeout"}.get(way, way)
    assert gave_up.value == [f"{name}: {ends}" for name in OPERATIONS], gave_up
    assert late.value == [f"{name}: PeerLost" for name in OPERATIONS], late
