"""A barrier that names the missing ranks.

The barrier uses the group's store, not its connections, so it also names the missing ranks when a collective hangs or
the group has failed. Cost: a few round trips to the store. Use it to find faults, not in an inner loop.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from netfold.errors import CollectiveTimeout
from netfold.torch.store import store_lost

# Rank 0 may begin later than this rank and still wait when this rank's timeout is over. Rank 0's result is better than
# this rank's own view, so wait longer for it.
_GRACE_S = 1.0
_PASSED = "passed"


class MonitoredBarriers:
    """The monitored barriers of one rank of a group. Each barrier has a number and its own keys."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._count = 0
        self._lock = threading.RLock()  # a signal handler may use the group

    def wait_all(self, timeout_s: float, wait_all_ranks: bool) -> None:
        """Wait until every rank has called this. CollectiveTimeout names the missing ranks, on every other rank.

        PeerLost if the store is gone, and with it rank 0 of the job.
        """
        try:
            self._wait_all(timeout_s, wait_all_ranks)
        except dist.DistNetworkError as error:
            raise store_lost(f"rank {self._rank}: monitored_barrier", error) from None

    def _wait_all(self, timeout_s: float, wait_all_ranks: bool) -> None:
        store, rank, size = self._store, self._rank, self._size
        with self._lock:
            self._count += 1
            number = self._count
        if timeout_s <= 0:
            raise CollectiveTimeout(
                f"Rank {rank} timed out in monitoredBarrier after {timeout_s:g} s: that leaves no time to wait",
                rank=rank,
            )
        began = time.monotonic()
        arrivals = [f"monitored_barrier/{number}/{other}" for other in range(size)]
        result = f"monitored_barrier/{number}/answer"
        store.set(arrivals[rank], "here")
        if rank == 0:
            missing = _wait(store, arrivals, began + timeout_s)
            store.set(result, ",".join(map(str, missing)) or _PASSED)
            if not missing:
                _delete_keys(store, number - 1, size)  # all ranks have left the previous barrier
        else:
            if _wait(store, [result], began + timeout_s + _GRACE_S):
                missing = _wait(store, arrivals, 0)
            else:
                text = store.get(result).decode()
                if text == _PASSED:
                    return
                missing = [int(each) for each in text.split(",")]
        if missing or rank != 0:
            raise CollectiveTimeout(_text(rank, missing, timeout_s, wait_all_ranks), rank=missing[0] if missing else 0)


def _text(rank: int, missing: Sequence[int], timeout_s: float, wait_all_ranks: bool) -> str:
    all_missing = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    if rank != 0:
        # The text of torch's own monitored_barrier, and then the ranks.
        return (
            f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from "
            f"rank 0: {all_missing + ' did not reach it' if missing else 'it gave no answer'} within {timeout_s:g} s"
        )
    if wait_all_ranks and len(missing) > 1:
        return f"[Rank 0]: Ranks {', '.join(map(str, missing))} failed to pass monitoredBarrier in {timeout_s:g} s"
    others = f" (missing in all: {all_missing})" if len(missing) > 1 else ""
    return f"[Rank 0]: Rank {missing[0]} failed to pass monitoredBarrier in {timeout_s:g} s{others}"


def _wait(store: Store, keys: list[str], deadline: float) -> list[int]:
    """Wait for all keys. Returns the indices of those not set in time."""
    left = deadline - time.monotonic()
    if left > 0:
        try:
            store.wait(keys, timedelta(seconds=left))
            return []
        except dist.DistNetworkError:
            raise
        except RuntimeError:  # DistStoreError: not all in time
            pass
    return [index for index, key in enumerate(keys) if not store.check([key])]


def _delete_keys(store: Store, number: int, size: int) -> None:
    for name in (*range(size), "answer"):
        store.delete_key(f"monitored_barrier/{number}/{name}")
