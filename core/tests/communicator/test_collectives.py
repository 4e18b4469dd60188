"""The collectives beside all-reduce, on NumPy arrays, over ranks, roots and uneven sizes. Ranks are threads.

Reductions use the direct algorithm, in rank order. Other algorithms: test_host_algorithms.py.
"""

from __future__ import annotations

import time

import numpy as np
import pytest
from ranks import run_threads, values
from reductions import FLOAT_OPS, INTEGER_OPS, by_rank, contribution

from netfold import Communicator, FileStore, Options

pytestmark = pytest.mark.native

TRANSPORTS = pytest.mark.parametrize("transport", ["auto", "tcp"])  # auto: the ranks share memory
RANKS = pytest.mark.parametrize("size", [1, 2, 3, 5])
# Elements of one rank's buffer. The largest exceeds the buffers of sockets.
COUNTS = (0, 1, 353, 100_003, 2_000_003)


def join(rank: int, size: int, folder: str, **options: str) -> Communicator:
    return Communicator(FileStore(folder), rank, size, options=Options(**options), timeout_s=20, join_timeout_s=20)


def in_rank_order(transport: str) -> str:
    """An algorithm that reduces floats in rank order, so that results are exact: shared memory, else direct."""
    return "direct" if transport == "tcp" else "auto"


def broadcast(rank: int, size: int, folder: str, transport: str) -> None:
    with join(rank, size, folder, transport=transport) as group:
        for root in range(size):
            for count in COUNTS:
                buffer = contribution(rank, count, "float64")
                group.broadcast(buffer, root)
                np.testing.assert_array_equal(buffer, contribution(root, count, "float64"))


def reduce(rank: int, size: int, folder: str, transport: str) -> None:
    with join(rank, size, folder, transport=transport, algorithm=in_rank_order(transport)) as group:
        for dtype, ops in (("float32", FLOAT_OPS), ("int32", INTEGER_OPS), ("float16", ("sum", "avg"))):
            for op in ops:
                for root in range(size):
                    parts = [contribution(other, 1000, dtype) for other in range(size)]
                    buffer = parts[rank].copy()
                    group.reduce(buffer, root, op=op)
                    expected = by_rank(op, parts) if rank == root else parts[rank]
                    np.testing.assert_array_equal(buffer, expected, strict=True)


def all_gather(rank: int, size: int, folder: str, transport: str) -> None:
    with join(rank, size, folder, transport=transport) as group:
        for count in COUNTS:
            counts = [count + 3 * other for other in range(size)]  # uneven
            into = [np.zeros(each, np.int64) for each in counts]
            group.all_gather(contribution(rank, counts[rank], "int64"), into)
            for other, got in enumerate(into):
                np.testing.assert_array_equal(got, contribution(other, counts[other], "int64"))


def reduce_scatter(rank: int, size: int, folder: str, transport: str) -> None:
    with join(rank, size, folder, transport=transport, algorithm=in_rank_order(transport)) as group:
        for count in COUNTS:
            for op in ("sum", "max"):
                # Rank a's buffer for rank b has values of its own.
                parts = [contribution(other * size + rank, count, "float32") for other in range(size)]
                into = np.empty(count, np.float32)
                group.reduce_scatter(
                    [contribution(rank * size + other, count, "float32") for other in range(size)], into, op=op
                )
                np.testing.assert_array_equal(into, by_rank(op, parts), strict=True)


def all_to_all(rank: int, size: int, folder: str, transport: str) -> None:
    with join(rank, size, folder, transport=transport) as group:
        for count in COUNTS:
            # From a to b: count + a + 2b elements.
            into = [np.zeros(count + other + 2 * rank, np.uint8) for other in range(size)]
            group.all_to_all(
                [contribution(rank * size + other, count + rank + 2 * other, "uint8") for other in range(size)], into
            )
            for other, got in enumerate(into):
                np.testing.assert_array_equal(got, contribution(other * size + rank, len(got), "uint8"))


def non_finite(rank: int, size: int, folder: str, transport: str) -> None:
    for algorithm in ("direct", "ring") if transport == "tcp" else ("shared_memory",):
        with join(rank, size, f"{folder}/{algorithm}", algorithm=algorithm, transport=transport) as group:
            for op in ("sum", "max", "min", "product"):
                buffer = np.full(1000, 1.0 + rank, np.float32)
                buffer[10 + rank] = np.nan
                buffer[20] = np.inf
                buffer[30] = np.inf if rank == 0 else -np.inf
                group.all_reduce(buffer, op=op)
                assert np.isnan(buffer[10 : 10 + size]).all(), op
                assert buffer[20] == np.inf, op
                if op == "sum" and size > 1:
                    assert np.isnan(buffer[30])
                assert np.isfinite(np.delete(buffer, [*range(10, 10 + size), 20, 30])).all(), op


@TRANSPORTS
@RANKS
@pytest.mark.parametrize("collective", [broadcast, reduce, all_gather, reduce_scatter, all_to_all])
def test_every_rank_gets_exactly_its_result(collective: object, size: int, transport: str) -> None:
    values(run_threads(collective, size, transport, timeout_s=60))


@TRANSPORTS
@RANKS
def test_nan_and_infinity_arrive_at_every_rank(size: int, transport: str) -> None:
    values(run_threads(non_finite, size, transport))


def barriers(rank: int, size: int, folder: str, transport: str) -> list[int]:
    """The number of arrivals, read after each barrier."""
    store = FileStore(f"{folder}/arrivals")
    with join(rank, size, f"{folder}/group", transport=transport) as group:
        seen = []
        for turn in range(20):
            store.set(f"{turn}/{rank}", b"")
            group.barrier()
            for other in range(size):
                store.get(f"{turn}/{other}", 0.0)  # raises where that rank has not arrived
            seen.append(turn)
        return seen


@TRANSPORTS
@RANKS
def test_no_rank_leaves_a_barrier_before_all_have_entered(size: int, transport: str) -> None:
    assert values(run_threads(barriers, size, transport)) == [list(range(20))] * size


def ahead(rank: int, size: int, folder: str) -> None:
    """Ranks that send without waiting run ahead of slow readers, by posts and by slots, and all is correct."""
    with join(rank, size, folder) as group:
        for turn in range(30):
            if turn % 3 == rank % 3:
                time.sleep(0.001)
            for count in (1, 4000, 500_000):
                root = (turn // 10) % size
                buffer = contribution(turn + rank, count, "float32")
                group.broadcast(buffer, root)
                np.testing.assert_array_equal(buffer, contribution(turn + root, count, "float32"))
                buffer = contribution(turn + rank, count, "float32")
                group.reduce(buffer, root)
                if rank == root:
                    parts = [contribution(turn + other, count, "float32") for other in range(size)]
                    np.testing.assert_array_equal(buffer, by_rank("sum", parts))


@RANKS
def test_roots_and_leaves_that_need_not_wait_run_ahead_without_harm(size: int) -> None:
    values(run_threads(ahead, size, timeout_s=60))


def misuse(rank: int, size: int, folder: str) -> list[str]:
    """Make calls that can never be right, and a good one after each."""
    said = []
    with join(rank, size, folder) as group:
        floats, integers = np.ones(8, np.float32), np.ones(8, np.int32)
        for call in (
            lambda: group.all_reduce(floats, op="bxor"),
            lambda: group.all_reduce(np.ones(8, bool), op="avg"),
            lambda: group.broadcast(floats, root=size),
            lambda: group.broadcast(floats, root=-1),
            lambda: group.all_gather(floats, [floats]),
            lambda: group.all_reduce(np.ones((4, 4), np.float32)[:, ::2]),
            lambda: group.all_reduce(np.ones(4, "m8[s]")),
            lambda: group.reduce_scatter([floats, integers], floats),
            lambda: group.reduce_scatter([floats, floats], np.ones(9, np.float32)),
            lambda: group.all_gather(floats, [np.ones(9, np.float32), np.ones(9, np.float32)]),
            lambda: group.all_to_all([floats, floats], [np.ones(9, np.float32), np.ones(9, np.float32)]),
            lambda: group.all_reduce(floats, op="mean"),
        ):
            try:
                call()
                said.append("nothing")
            except (ValueError, TypeError) as error:
                said.append(f"{type(error).__name__}: {error}")
            good = np.full(3, rank + 1.0)
            group.all_reduce(good)
            assert good.tolist() == [size * (size + 1) / 2] * 3
    return said


def test_misuse_is_refused_in_a_sentence_and_changes_nothing() -> None:
    said = values(run_threads(misuse, 2))[0]
    for text, words in zip(
        said,
        (
            "ValueError: all_reduce: bxor is not defined for f32",
            "ValueError: all_reduce: avg is not defined for bool",
            "ValueError: broadcast: root 2 is not a rank of this group of 2",
            "ValueError: broadcast: root -1 is not a rank of this group of 2",
            "ValueError: all_gather: needs 2 output buffers, not 1",
            "ValueError: the array must be C-contiguous",
            "TypeError: arrays of timedelta64[s] cannot travel",
            "TypeError: reduce_scatter: every array must be f32",
            "ValueError: reduce_scatter:",
            "ValueError: all_gather:",
            "ValueError: all_to_all:",
            "ValueError: all_reduce:",
        ),
        strict=True,
    ):
        assert text.startswith(words), (text, words)
