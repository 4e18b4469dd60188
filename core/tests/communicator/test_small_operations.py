"""Small operations whose caller does not wait: its thread tries once, then the engine's thread takes over."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
from load import seconds
from ranks import run_threads, values

from netfold import Communicator, FileStore, Options
from netfold.communicator.group import region

pytestmark = pytest.mark.native

# netfold/engine/group.hpp
TRY_BYTES = 16 << 10
SOON_S = 3.0


def join(rank: int, size: int, folder: str, transport: str = "auto") -> Communicator:
    options = Options(transport=transport)
    return Communicator(FileStore(folder), rank, size, options=options, timeout_s=20, join_timeout_s=20)


def start_all_reduce(group: Communicator, buffer: Any) -> Any:
    return group.group.submit("all_reduce", dtype="f32", outputs=[region(buffer)], wait_here=False)


def ends(operation: Any) -> bool:
    """The caller does not wait, so another thread drives the operation."""
    deadline = time.monotonic() + seconds(SOON_S)
    while not operation.done and time.monotonic() < deadline:
        time.sleep(0.001)
    return bool(operation.done)


def alone(rank: int, size: int, folder: str) -> None:
    with join(rank, size, folder) as group:
        for size_bytes in (4, TRY_BYTES, TRY_BYTES + 4):
            buffer = np.ones(size_bytes // 4, np.float32)
            operation = start_all_reduce(group, buffer)
            small = size_bytes <= TRY_BYTES
            assert operation.done or not small
            assert ends(operation)
            assert group.group.events()["inlined"][-1] == small


def test_a_small_operation_of_a_rank_alone_is_done_at_once() -> None:
    values(run_threads(alone, 1))


def comes_last(rank: int, size: int, folder: str) -> None:
    with join(rank, size, folder) as group:
        for _ in range(20):
            group.barrier()
            buffer = np.full(10, rank + 1.0, np.float32)
            if rank == 1:
                time.sleep(0.01)
            operation = start_all_reduce(group, buffer)
            if rank == 1:
                assert operation.done, "the other's part was there"
            assert ends(operation)
            assert (buffer == 3.0).all()
            assert group.group.events()["inlined"][-1] == rank


def test_the_last_rank_is_done_at_once_and_the_first_need_not_wait() -> None:
    values(run_threads(comes_last, 2))


def mixes(rank: int, size: int, folder: str, transport: str, seed: int) -> None:
    everybody, ours = random.Random(seed), random.Random(seed + rank)
    counts = [everybody.choice([1, 100, TRY_BYTES // 4, TRY_BYTES // 4 + 1, 300_000]) for _ in range(60)]
    with join(rank, size, folder, transport) as group:
        buffers = [np.arange(count, dtype=np.float32) % 1000 + rank + place for place, count in enumerate(counts)]
        work = []
        for buffer in buffers:
            work.append(start_all_reduce(group, buffer))
            if ours.random() < 0.3:
                group.group.wait(ours.choice(work))
        ours.shuffle(work)
        for operation in work:
            group.group.wait(operation)
        for place, buffer in enumerate(buffers):
            ranks = size * (size - 1) // 2
            expected = size * (np.arange(len(buffer), dtype=np.float32) % 1000 + place) + ranks
            np.testing.assert_array_equal(buffer, expected)
        events = group.group.events()
        assert events["sequence"].tolist() == list(range(1, len(counts) + 1)), "they end in order of submission"


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("seed", range(3))
def test_small_and_large_operations_keep_their_order_whichever_thread_drives(transport: str, seed: int) -> None:
    values(run_threads(mixes, 3, transport, seed))
