"""Collectives through shared memory inside hosts and over the mesh between them. Hosts are simulated by threads."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hosts import apart
from ranks import run_threads, values
from reductions import UFUNCS, Array, contribution

from netfold import Communicator, FileStore, Options
from netfold.communicator import group as group_module
from netfold.tuning import SUPPORTS, build_table, choice_table
from netfold.tuning.cost import BY_NAME_ONLY, Case, best_between

pytestmark = pytest.mark.native

# Even and uneven hosts, with consecutive ranks or not, some with one rank.
LAYOUTS = [(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1, 1), (0, 1, 1), (0, 0, 1, 1, 2, 2), (0, 1, 2, 2, 2, 1)]
COUNTS = (0, 1, 2, 3, 1000, 4097, 300_007)


def reduce(rank: int, size: int, folder: str, algorithm: str) -> tuple[tuple[int, ...], str]:
    options = Options(algorithm=algorithm, probe="off")
    with Communicator(FileStore(folder), rank, size, options=options, timeout_s=60, join_timeout_s=60) as group:
        for count in COUNTS:
            for op, dtype in (("sum", "int64"), ("max", "float32"), ("avg", "float64"), ("sum", "float32")):
                parts = [contribution(other, count, dtype) for other in range(size)]
                buffer = parts[rank].copy()
                group.all_reduce(buffer, op=op)
                if op == "max":
                    np.testing.assert_array_equal(buffer, np.max(parts, axis=0))
                elif dtype == "int64":
                    np.testing.assert_array_equal(buffer, np.sum(parts, axis=0))
                else:
                    # Any order of summation is within P roundings of the sum of magnitudes.
                    total = np.sum(parts, axis=0, dtype=np.longdouble) / (size if op == "avg" else 1)
                    bound = size * np.finfo(dtype).eps * np.sum(np.abs(parts), axis=0, dtype=np.longdouble)
                    assert (np.abs(buffer - total) <= bound).all()
            gathered = [np.empty(count, np.float32) for _ in range(size)]
            group.all_gather(contribution(rank, count, "float32"), gathered)  # over the mesh, between two others
            np.testing.assert_array_equal(gathered[-1], contribution(size - 1, count, "float32"))
        events = group.group.events()
        run = {int(event["algorithm"]) for event in events if event["operation"] == 0}
        assert run == {group_module.engine.ALGORITHMS["hierarchical"]}
        return group.group.nodes, group.group.why("all_reduce", 1 << 20)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_rank_gets_the_sum(monkeypatch: pytest.MonkeyPatch, layout: tuple[int, ...]) -> None:
    monkeypatch.setattr(*apart(layout))
    for found, why in values(run_threads(reduce, len(layout), "all_reduce=hierarchical", timeout_s=60)):
        assert found == layout
        assert why.startswith("hierarchical")


def connections() -> int:
    """Ends of established TCP connections in this process."""
    own = set()
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            own.add(os.readlink(f"/proc/self/fd/{each}"))
    lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return sum(line[3] == "01" and f"socket:[{line[9]}]" in own for line in lines)


def opened(rank: int, size: int, folder: str) -> list[int]:
    """The connections of all ranks, which are threads, after all_reduces of 1, 255 and 512 f32."""
    found = []
    options = Options(algorithm="all_reduce=hierarchical", probe="off")
    with Communicator(FileStore(folder), rank, size, options=options, timeout_s=60, join_timeout_s=60) as group:
        group.barrier()
        for count in (1, 255, 512):
            array = np.full(count, rank + 1, np.float32)
            group.all_reduce(array)
            np.testing.assert_array_equal(array, np.full(count, size * (size + 1) / 2))
            group.barrier()
            found.append(connections())
            group.barrier()
    return found


def test_of_a_small_tensor_only_the_first_ranks_of_hosts_have_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*apart((0, 0, 1, 1)))
    one, most, two_parts = values(run_threads(opened, 4))[0]
    assert one == most < two_parts


def test_auto_chooses_hierarchical_where_hosts_have_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = (0, 0, 1, 1)
    monkeypatch.setattr(*apart(layout))
    for _, why in values(run_threads(reduce, len(layout), "auto", timeout_s=60)):
        assert why.startswith("hierarchical (") and "between hosts" in why


# --- the other operations ---

UNEVEN = [(0, 0, 1), (0, 1, 0, 1), (0, 0, 0, 1), (0, 0, 1, 1), (1, 0, 0, 2, 1)]
BLOCKS = (0, 1, 7, 1009, 60_013)
# How much longer another rank's block is, and whether all blocks are contiguous in memory.
BLOCKS_OF = ((0, True), (0, False), (5, True), (5, False))
REDUCTIONS = (("sum", "int64"), ("bxor", "uint8"), ("max", "float32"), ("avg", "float64"), ("sum", "float16"))


def expect(got: Array, op: str, parts: list[Array]) -> None:
    """`got` is the reduction of `parts`: exact, or, for sums of floats, within the error bound of any order."""
    if op not in ("sum", "avg") or parts[0].dtype.kind in "iu":
        folded = parts[0]
        for part in parts[1:]:
            folded = UFUNCS[op](folded, part)
        np.testing.assert_array_equal(got, folded, strict=True)
        return
    wide = [part.astype(np.longdouble) for part in parts]
    total = np.sum(wide, axis=0) / (len(parts) if op == "avg" else 1)
    magnitude = np.sum(np.abs(wide), axis=0)
    assert got.dtype == parts[0].dtype
    assert (np.abs(got - total) <= len(parts) * np.finfo(got.dtype).eps * magnitude).all()


def blocks(group: Communicator, count: int, uneven: int, dtype: str, together: bool) -> list[Array]:
    """A buffer for each rank, of `count` elements and more; contiguous in memory, or not."""
    counts = [count + uneven * ((rank * 3) % 4) for rank in range(group.size)]
    if not together:
        return [np.zeros(each, dtype) for each in counts]
    whole = np.zeros(sum(counts), dtype)
    return list(np.split(whole, np.cumsum(counts)[:-1]))


def check_broadcast(group: Communicator, count: int) -> None:
    for root in range(group.size):
        moved = contribution(group.rank, count, "int32")
        group.broadcast(moved, root)
        np.testing.assert_array_equal(moved, contribution(root, count, "int32"))


def check_reduce(group: Communicator, count: int) -> None:
    for op, dtype in REDUCTIONS:
        parts = [contribution(other, count, dtype) for other in range(group.size)]
        for root in {0, group.size // 2, group.size - 1}:
            mine = parts[group.rank].copy()
            group.reduce(mine, root, op=op)
            if group.rank == root:
                expect(mine, op, parts)
            else:
                np.testing.assert_array_equal(mine, parts[group.rank])


def check_all_gather(group: Communicator, count: int) -> None:
    for uneven, together in BLOCKS_OF:
        gathered = blocks(group, count, uneven, "float32", together)
        group.all_gather(contribution(group.rank, len(gathered[group.rank]), "float32"), gathered)
        for other, got in enumerate(gathered):
            np.testing.assert_array_equal(got, contribution(other, len(got), "float32"))
        group.all_gather(gathered[group.rank], gathered)  # in place
        for other, got in enumerate(gathered):
            np.testing.assert_array_equal(got, contribution(other, len(got), "float32"))


def check_reduce_scatter(group: Communicator, count: int) -> None:
    rank, size = group.rank, group.size
    for uneven, together in BLOCKS_OF:
        for op, dtype in REDUCTIONS:
            given = blocks(group, count, uneven, dtype, together)
            for other, block in enumerate(given):
                block[:] = contribution(rank * size + other, len(block), dtype)
            before = [block.copy() for block in given]
            into = np.zeros_like(given[rank])
            group.reduce_scatter(given, into, op=op)
            expect(into, op, [contribution(other * size + rank, len(into), dtype) for other in range(size)])
            for was, block in zip(before, given, strict=True):
                np.testing.assert_array_equal(block, was)


def check_gather(group: Communicator, count: int) -> None:
    for uneven, together in BLOCKS_OF:
        for root in {0, group.size // 2, group.size - 1}:
            into = blocks(group, count, uneven, "float32", together)
            mine = contribution(group.rank, len(into[group.rank]), "float32")
            group.gather(mine, into if group.rank == root else None, root)
            for other, got in enumerate(into if group.rank == root else ()):
                np.testing.assert_array_equal(got, contribution(other, len(got), "float32"))


def check_scatter(group: Communicator, count: int) -> None:
    rank, size = group.rank, group.size
    for uneven, together in BLOCKS_OF:
        for root in {0, size // 2, size - 1}:
            given = blocks(group, count, uneven, "float32", together)
            for other, block in enumerate(given):
                block[:] = contribution(root * size + other, len(block), "float32")
            mine = np.zeros(len(given[rank]), np.float32)
            group.scatter(given if rank == root else None, mine, root)
            np.testing.assert_array_equal(mine, contribution(root * size + rank, len(mine), "float32"))


def check_all_to_all(group: Communicator, count: int) -> None:
    rank, size = group.rank, group.size
    for uneven in (0, 5):
        given = [contribution(rank * size + o, count + uneven * (rank + 2 * o), "int16") for o in range(size)]
        taken = [np.zeros(count + uneven * (other + 2 * rank), np.int16) for other in range(size)]
        group.all_to_all(given, taken)
        for other, got in enumerate(taken):
            np.testing.assert_array_equal(got, contribution(other * size + rank, len(got), "int16"))


def check_barrier(group: Communicator, count: int) -> None:
    group.barrier()


def every_operation(rank: int, size: int, folder: str, operations: set[str]) -> dict[str, set[int]]:
    """Run each of `operations` with blocks of every length; returns the algorithms that ran, by operation."""
    options = Options(algorithm="hierarchical", probe="off")
    with Communicator(FileStore(folder), rank, size, options=options, timeout_s=60, join_timeout_s=60) as group:
        for count in BLOCKS:
            for operation in sorted(operations):
                globals()[f"check_{operation}"](group, count)
        ran: dict[str, set[int]] = {}
        for event in group.group.events():
            name = next(kind for kind, number in group_module.KINDS.items() if number == event["operation"])
            ran.setdefault(name, set()).add(int(event["algorithm"]))
        return ran


@pytest.mark.parametrize("layout", UNEVEN, ids=str)
def test_every_operation_is_correct_on_uneven_hosts(monkeypatch: pytest.MonkeyPatch, layout: tuple[int, ...]) -> None:
    monkeypatch.setattr(*apart(layout))
    able = {name for name in group_module.KINDS if name in SUPPORTS["hierarchical"]} - {"all_reduce"}
    for ran in values(run_threads(every_operation, len(layout), able, timeout_s=100)):
        assert ran == {name: {group_module.engine.ALGORITHMS["hierarchical"]} for name in able}


@pytest.mark.parametrize("between", ["direct", "ring", "halving_doubling", "tree", "chain", "bruck", "pairwise"])
@pytest.mark.parametrize("layout", [(1, 0, 0, 2, 1), (0, 1, 2, 2, 3, 4)], ids=str)
def test_every_algorithm_runs_between_hosts_for_its_operations(
    monkeypatch: pytest.MonkeyPatch, layout: tuple[int, ...], between: str
) -> None:
    able = {name for name in SUPPORTS[between] if (name, between) not in BY_NAME_ONLY}

    def forced(operation: str, case: Case) -> str:
        return between if operation in able else best_between(operation, case)

    monkeypatch.setattr(*apart(layout))
    monkeypatch.setattr(choice_table, "best_between", forced)
    build_table.cache_clear()
    others = (able & set(SUPPORTS["hierarchical"])) - {"all_reduce"}
    try:
        for ran in values(run_threads(every_operation, len(layout), others, timeout_s=100)):
            assert ran == {name: {group_module.engine.ALGORITHMS["hierarchical"]} for name in others}
        if "all_reduce" in able:
            for _, why in values(run_threads(reduce, len(layout), "all_reduce=hierarchical", timeout_s=60)):
                assert f": {between} between hosts" in why
    finally:
        build_table.cache_clear()


def held_back(rank: int, size: int, folder: str, arrived: list[int]) -> None:
    options = Options(algorithm="hierarchical", probe="off")
    with Communicator(FileStore(folder), rank, size, options=options, timeout_s=60, join_timeout_s=60) as group:
        for turn in range(size):
            if rank == turn:
                time.sleep(0.02)
            arrived[rank] += 1
            came = arrived[rank]
            group.barrier()
            assert min(arrived) >= came, f"rank {rank} went on before all of {arrived} were there"


@pytest.mark.parametrize("layout", UNEVEN, ids=str)
def test_no_rank_leaves_a_barrier_before_the_last_has_entered(
    monkeypatch: pytest.MonkeyPatch, layout: tuple[int, ...]
) -> None:
    monkeypatch.setattr(*apart(layout))
    values(run_threads(held_back, len(layout), [0] * len(layout)))


def disagrees(rank: int, size: int, folder: str, operation: str) -> str:
    """Rank 2, the root, alone on its host, expects 1 and 3 elements of ranks 0 and 1; they have 3 and 1."""
    options = Options(algorithm="hierarchical", probe="off")
    with Communicator(FileStore(folder), rank, size, options=options, timeout_s=10, join_timeout_s=20) as group:
        counts = (1, 3, 2) if rank == 2 else (3, 1, 2)
        buffers = [np.ones(count) for count in counts]
        try:
            if operation == "all_gather":
                group.all_gather(np.ones(counts[rank]), buffers)
            elif operation == "reduce_scatter":
                group.reduce_scatter(buffers, np.ones(counts[rank]))
            elif operation == "gather":
                group.gather(np.ones(counts[rank]), buffers if rank == 2 else None, 2)
            else:
                group.scatter(buffers if rank == 2 else None, np.ones(counts[rank]), 2)
            group.barrier()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter", "gather", "scatter"])
def test_hosts_with_different_sizes_of_the_same_total_get_the_mismatch(
    monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    monkeypatch.setattr(*apart((0, 0, 1)))
    found = values(run_threads(disagrees, 3, operation))
    assert any(said.startswith("Mismatch") and f"{operation} #1" in said for said in found), found
    assert all(said.startswith(("Mismatch", "PeerLost")) for said in found), found


def ends_early(rank: int, size: int, folder: str, victim: int, operation: str) -> Any:
    options = Options(algorithm="hierarchical", probe="off")
    with Communicator(FileStore(folder), rank, size, options=options, timeout_s=60, join_timeout_s=60) as group:
        buffers = [np.ones(50_000) for _ in range(size)]
        call = {
            "broadcast": lambda: group.broadcast(buffers[0], 0),
            "reduce": lambda: group.reduce(buffers[0], 0),
            "all_gather": lambda: group.all_gather(np.ones(50_000), buffers),
            "reduce_scatter": lambda: group.reduce_scatter(buffers, np.ones(50_000)),
            "all_to_all": lambda: group.all_to_all(buffers, [np.ones(50_000) for _ in buffers]),
            "gather": lambda: group.gather(buffers[0], buffers if rank == 0 else None, 0),
            "scatter": lambda: group.scatter(buffers if rank == 0 else None, np.ones(50_000), 0),
            "barrier": group.barrier,
        }[operation]
        call()
        if rank == victim:
            group.group.abort("it had enough")
        try:
            while True:
                call()
        except Exception as error:
            return getattr(error, "rank", None), str(error)


@pytest.mark.parametrize(
    "operation",
    ["broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "barrier"],
)
@pytest.mark.parametrize("victim", [1, 2])
def test_a_rank_that_gives_up_is_named_on_both_hosts(
    monkeypatch: pytest.MonkeyPatch, victim: int, operation: str
) -> None:
    monkeypatch.setattr(*apart((0, 0, 1, 1)))
    for named, said in values(run_threads(ends_early, 4, victim, operation)):
        assert named == victim, said
        assert "it had enough" in said
