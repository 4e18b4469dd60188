"""Functions for the harness's own tests: a rank with three defects, and a report of clocks and /dev/shm."""

from __future__ import annotations

import os
import time

import job
from verdict import STEP_S

RANK = 1
# Of rank 1's calls of all_reduce, two a step.
WRONG_CALL, HANGS_CALL, FAILS_CALL = 30, 40, 44


def look(ask: str) -> None:
    """Print both clocks and what is in /dev/shm, once the file `ask` is there."""
    while not os.path.exists(ask):
        time.sleep(0.02)
    print(time.time(), time.monotonic(), os.listdir("/dev/shm"), flush=True)


def run_rank(folder: str, record: str) -> None:
    import torch.distributed as dist
    from arena import SLOWDOWN_MOST

    real, calls = dist.all_reduce, 0

    def all_reduce(tensor, *args, **options):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        if int(os.environ["RANK"]) == RANK:
            if calls == WRONG_CALL + 1:
                tensor[5] += 1
            elif calls == HANGS_CALL:
                time.sleep(STEP_S * SLOWDOWN_MOST + 1)
            elif calls == FAILS_CALL:
                raise RuntimeError("planted")
        return real(tensor, *args, **options)

    dist.all_reduce = all_reduce
    job.run_rank(folder, record)
