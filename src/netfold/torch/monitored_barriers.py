"""A barrier that names the ranks that did not come.

It goes over the group's store and not over its connections, so that it also says who is missing when a collective hangs
or the group has failed. Costs a few round trips to the store: for finding faults, not for the inner loop.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from netfold.errors import CollectiveTimeout

# Rank 0 may have come later than others and still be waiting when their time is over; its answer is the better one.
_GRACE_S = 1.0
_PASSED = "passed"


class MonitoredBarriers:
    """One rank's count of the barriers of a group: every one has keys of its own."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._count = 0
        self._lock = threading.Lock()

    def wait_all(self, timeout_s: float, wait_all_ranks: bool) -> None:
        """Return once every rank is here; CollectiveTimeout names those that are not, on every rank that is."""
        store, rank, size = self._store, self._rank, self._size
        with self._lock:
            self._count += 1
            turn = self._count
        if timeout_s <= 0:
            raise CollectiveTimeout(
                f"Rank {rank} timed out in monitoredBarrier after {timeout_s:g} s: that leaves no time to wait",
                rank=rank,
            )
        began = time.monotonic()
        here = [f"monitored_barrier/{turn}/{other}" for other in range(size)]
        answer = f"monitored_barrier/{turn}/answer"
        store.set(here[rank], "here")
        if rank == 0:
            missing = _wait(store, here, began + timeout_s)
            store.set(answer, ",".join(map(str, missing)) or _PASSED)
            if not missing:
                _forget(store, turn - 1, size)  # all have passed that one: they are here
        else:
            if _wait(store, [answer], began + timeout_s + _GRACE_S):
                missing = _wait(store, here, 0)
            else:
                said = store.get(answer).decode()
                missing = [] if said == _PASSED else [int(word) for word in said.split(",")]
                if not missing:
                    return
        if missing or rank != 0:
            raise CollectiveTimeout(_text(rank, missing, timeout_s, wait_all_ranks), rank=missing[0] if missing else 0)


def _text(rank: int, missing: Sequence[int], timeout_s: float, wait_all_ranks: bool) -> str:
    all_missing = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    if rank != 0:
        # The words that torch's own monitored_barrier has for it, and then the ranks.
        return (
            f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from "
            f"rank 0: {all_missing + ' did not reach it' if missing else 'it gave no answer'} within {timeout_s:g} s"
        )
    if wait_all_ranks and len(missing) > 1:
        return f"[Rank 0]: Ranks {', '.join(map(str, missing))} failed to pass monitoredBarrier in {timeout_s:g} s"
    others = f" (missing in all: {all_missing})" if len(missing) > 1 else ""
    return f"[Rank 0]: Rank {missing[0]} failed to pass monitoredBarrier in {timeout_s:g} s{others}"


def _wait(store: Store, keys: list[str], deadline: float) -> list[int]:
    """The places of the keys that were not set in time."""
    left = deadline - time.monotonic()
    if left > 0:
        try:
            store.wait(keys, timedelta(seconds=left))
            return []
        except RuntimeError:  # DistStoreError: not all in time
            pass
    return [place for place, key in enumerate(keys) if not store.check([key])]


def _forget(store: Store, turn: int, size: int) -> None:
    for word in (*range(size), "answer"):
        store.delete_key(f"monitored_barrier/{turn}/{word}")
