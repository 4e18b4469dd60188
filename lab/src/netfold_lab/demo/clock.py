"""Measure the all-reduce of every gradient bucket, for any backend: a DDP communication hook.

The hook does what DDP does without a hook: it divides by the world size and adds over all ranks. It also notes when the
backend receives a bucket, and when the bucket's future completes.
"""

# No `from __future__ import annotations` here: DDP inspects the hook's annotations and wants types, not text.
import time

import torch
import torch.distributed as dist
from torch import Tensor


class CollectiveClock:
    """The begin and end of every all-reduce of this rank's gradients since `reset`."""

    def __init__(self) -> None:
        self._intervals_ns: list[tuple[int, int]] = []

    def reset(self) -> None:
        self._intervals_ns.clear()

    def in_flight_s(self) -> float:
        """The time with at least one all-reduce under way. The time of simultaneous buckets counts once."""
        return union_ns(self._intervals_ns) / 1e9

    # torch does not export GradBucket to type checkers, and `then` is untyped.
    def hook(self, _: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        gradients = bucket.buffer()
        gradients.div_(dist.get_world_size())
        started_ns = time.perf_counter_ns()
        work = dist.all_reduce(gradients, async_op=True)
        assert work is not None

        def completed(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            self._intervals_ns.append((started_ns, time.perf_counter_ns()))
            return future.value()[0]

        averaged: torch.futures.Future[Tensor] = work.get_future().then(completed)
        return averaged


def union_ns(intervals: list[tuple[int, int]]) -> int:
    """The length of the union of intervals (start, end)."""
    covered, reached = 0, 0
    for start, end in sorted(intervals):
        covered += max(0, end - max(start, reached))
        reached = max(reached, end)
    return covered
