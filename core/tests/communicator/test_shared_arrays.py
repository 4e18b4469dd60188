"""Arrays in shared memory: collectives read and write them in place. Ranks are threads."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks, run_threads, values
from reductions import by_rank, contribution

import netfold
from netfold import Communicator, FileStore

pytestmark = pytest.mark.native

COUNTS = (0, 1, 4097, 300_003)
Make = Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]


def join(rank: int, size: int, folder: str) -> Communicator:
    return Communicator(FileStore(folder), rank, size, timeout_s=20, join_timeout_s=20)


def shared(values_: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array = netfold.empty(values_.shape, values_.dtype)
    array[:] = values_
    return array


def inside(values_: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A view that starts at an odd element of a longer array, whose other elements must not change."""
    whole = netfold.empty(len(values_) + 20, values_.dtype)
    whole[:] = 77
    whole[13 : 13 + len(values_)] = values_
    return whole[13 : 13 + len(values_)]


def frame_is_whole(view: np.ndarray[Any, Any]) -> bool:
    base = view.base
    return bool((base[:13] == 77).all() and (base[13 + len(view) :] == 77).all())


# Which ranks use shared arrays: all, or only some.
LAYOUTS: dict[str, Callable[[int], Make]] = {
    "shared": lambda rank: shared,
    "inside": lambda rank: inside,
    "mixed": lambda rank: shared if rank % 2 else np.copy,
}


def everything(rank: int, size: int, folder: str, layout: str) -> None:
    make = LAYOUTS[layout](rank)
    with join(rank, size, folder) as group:
        for count in COUNTS:
            for dtype in ("float32", "int16"):
                parts = [contribution(other, count, dtype) for other in range(size)]
                buffer = make(parts[rank])
                group.all_reduce(buffer, op="max")
                np.testing.assert_array_equal(buffer, by_rank("max", parts), strict=True)
                buffer[:] = parts[rank]
                group.all_reduce(buffer)
                np.testing.assert_array_equal(buffer, by_rank("sum", parts), strict=True)
                assert make is not inside or frame_is_whole(buffer)
            for root in range(size):
                buffer = make(parts[rank])
                group.reduce(buffer, root)
                np.testing.assert_array_equal(buffer, by_rank("sum", parts) if rank == root else parts[rank])
                buffer[:] = parts[rank]
                group.broadcast(buffer, root)
                np.testing.assert_array_equal(buffer, parts[root])
            into = [make(np.zeros(count + 3 * other, np.int64)) for other in range(size)]
            group.all_gather(make(contribution(rank, count + 3 * rank, "int64")), into)
            for other, got in enumerate(into):
                np.testing.assert_array_equal(got, contribution(other, count + 3 * other, "int64"))
            into = [make(np.zeros(count + other + 2 * rank, np.uint8)) for other in range(size)]
            group.all_to_all(
                [make(contribution(rank * size + other, count + rank + 2 * other, "uint8")) for other in range(size)],
                into,
            )
            for other, got in enumerate(into):
                np.testing.assert_array_equal(got, contribution(other * size + rank, len(got), "uint8"))
            one = make(np.zeros(count, np.float32))
            group.reduce_scatter(
                [make(contribution(rank * size + other, count, "float32")) for other in range(size)], one
            )
            expected = by_rank("sum", [contribution(other * size + rank, count, "float32") for other in range(size)])
            np.testing.assert_array_equal(one, expected, strict=True)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_gets_exactly_its_result(layout: str, size: int) -> None:
    values(run_threads(everything, size, layout, timeout_s=60))


def in_processes(rank: int, size: int, folder: str) -> int:
    """Make and free buffers; returns the bytes that are still mapped of freed ones."""
    with join(rank, size, folder) as group:
        for turn in range(40):
            buffer = shared(contribution(turn + rank, 50_000 + turn, "float64"))
            group.all_reduce(buffer)
            parts = [contribution(turn + other, 50_000 + turn, "float64") for other in range(size)]
            np.testing.assert_array_equal(buffer, by_rank("sum", parts))
            del buffer
            gc.collect()
        group.all_reduce(shared(np.ones(50_000)))
        maps = Path("/proc/self/maps").read_text().splitlines()
        return sum("memfd:netfold-buffer" in line for line in maps)


def test_freed_memory_is_freed_on_all_ranks() -> None:
    # The other ranks may still map the last buffer of each rank.
    assert max(values(run_ranks(in_processes, 3))) <= 2 * 3


def test_an_array_lives_as_long_as_its_views_and_starts_as_zeroes() -> None:
    view = netfold.empty((3, 5), np.int32)[1:]
    gc.collect()
    assert view.tolist() == [[0] * 5] * 2
    assert view.flags.writeable and view.dtype == np.int32
    assert netfold.empty(0).size == 0
    with pytest.raises(ValueError, match="no array has the shape"):
        netfold.empty(-1)


def shared_memory_bytes() -> int:
    """Shared memory of the whole machine, that of other tests included."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) << 10
    raise AssertionError("/proc/meminfo does not say")


def gathers_new_arrays(rank: int, size: int, folder: str) -> int:
    """The growth of shared memory after each rank has freed all of its arrays but the last."""
    with join(rank, size, folder) as group:
        group.barrier()
        before = shared_memory_bytes()
        for turn in range(60):
            mine = netfold.empty((4 << 20,), np.float32)
            mine[::1024] = rank + turn
            into = [np.zeros(4 << 20, np.float32) for _ in range(size)] if rank == 0 else None
            group.gather(mine, into)
            if into is not None:
                assert [each[0] for each in into] == [other + turn for other in range(size)]
            del mine, into
        group.barrier()
        grown = shared_memory_bytes() - before
        group.barrier()
        return grown


def test_freed_arrays_are_kept_by_no_rank() -> None:
    # 60 times 16 MB from each of three ranks. Ranks 1 and 2 do not read each other's arrays.
    grown = values(run_ranks(gathers_new_arrays, 3))
    assert max(grown) < 1 << 30, grown


def test_shared_memory_asks_for_huge_pages() -> None:
    array = netfold.empty(1 << 20, np.float32)
    address = array.__array_interface__["data"][0]
    flags: dict[int, list[str]] = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first:
            begin = int(first.split("-")[0], 16)
        elif first == "VmFlags:":
            flags[begin] = rest
    assert "hg" in flags[address]  # MADV_HUGEPAGE, madvise(2)
