"""The direct exchange adds what has arrived, and sends its own values before the sum replaces them."""

from __future__ import annotations

import time

import numpy as np
import pytest
from interceptor import ThroughInterceptor
from load import seconds
from ranks import run_threads

from netfold import Communicator, Options

pytestmark = pytest.mark.native

# More than the sockets on the way hold, so that a rank has not sent all while the other does not read.
COUNT = 8 << 20


def _held(rank: int, size: int, folder: str, tensors: dict[int, np.ndarray]) -> str:
    store = ThroughInterceptor(folder)
    options = Options(transport="tcp", algorithm="all_reduce=direct")
    with Communicator(store, rank, size, options=options, timeout_s=30) as group:
        tensors[rank] = np.full(COUNT, rank + 1, dtype=np.float32)
        group.barrier()
        if rank == 0:
            store.interceptor.attack_after = 1 << 20
            store.interceptor.attack = "hold"
        group.barrier()
        work = group.all_reduce(tensors[rank], asynchronous=True)
        if rank == 0:
            assert store.interceptor.done.wait(seconds(10))
            until = time.monotonic() + 10
            while 3 not in (tensors[0][0], tensors[1][0]) and time.monotonic() < until:
                time.sleep(0.001)
            time.sleep(0.1)  # the other direction goes on until the sockets are full
            added = [int((tensor == 3).sum()) for tensor in tensors.values()]
            store.interceptor.released.set()
            assert 0 < max(added) < COUNT, added
        work.wait()
        group.barrier()
        return "right" if (tensors[rank] == 3).all() else "wrong"


def test_values_are_added_as_they_arrive_and_never_before_they_are_sent() -> None:
    outcomes = run_threads(_held, 2, {})
    assert [outcome.value for outcome in outcomes] == ["right", "right"], outcomes
