"""Every operation in each of its forms: lists, one array, a new array; in place and not; blocking and not."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from load import seconds
from ranks import run_threads, values
from reductions import contribution

from netfold import Communicator, FileStore, Options
from netfold.communicator import Work

pytestmark = pytest.mark.native

RANKS = pytest.mark.parametrize("size", [1, 2, 3])
ROWS = 5


def join(rank: int, size: int, folder: str, **options: str) -> Communicator:
    return Communicator(FileStore(folder), rank, size, options=Options(**options), timeout_s=20, join_timeout_s=20)


def part(rank: int, shape: tuple[int, ...] = (ROWS, 3), dtype: str = "float64") -> Any:
    return contribution(rank, int(np.prod(shape)), dtype).reshape(shape)


def same(got: Any, expected: Any) -> None:
    np.testing.assert_array_equal(got, expected, strict=True)


def every_form(rank: int, size: int, folder: str, asynchronous: bool) -> None:
    with join(rank, size, folder) as group:

        def run(method: Any, *args: Any, **options: Any) -> Any:
            if not asynchronous:
                return method(*args, **options)
            work = method(*args, asynchronous=True, **options)
            assert isinstance(work, Work)
            got = work.wait(seconds(20))
            assert work.done and work.result is got
            return got

        parts = [part(other) for other in range(size)]
        total = np.add.reduce(parts)
        mine, out = parts[rank].copy(), np.zeros((ROWS, 3))
        assert run(group.all_reduce, mine, out) is out
        same(out, total)
        same(mine, parts[rank])
        assert run(group.all_reduce, mine) is mine
        same(mine, total)

        for root in range(size):
            mine, out = parts[rank].copy(), np.zeros((ROWS, 3))
            got = run(group.reduce, mine, root, out=out)
            same(mine, parts[rank])
            assert got is (out if rank == root else None)
            same(out, total if rank == root else np.zeros((ROWS, 3)))
            mine = parts[rank].copy()
            assert run(group.broadcast, mine, root) is mine
            same(mine, parts[root])

            got = run(group.gather, parts[rank], None, root)
            if rank == root:
                same(got, np.stack(parts))
                flat = np.zeros((size * ROWS, 3))
                assert run(group.gather, parts[rank], flat, root) is flat
                same(flat, np.concatenate(parts))
            else:
                assert got is None and run(group.gather, parts[rank], None, root) is None
            uneven = [np.zeros(4 + other) for other in range(size)]
            run(group.gather, part(rank, (4 + rank,)), uneven if rank == root else None, root)
            if rank == root:
                for other, got in enumerate(uneven):
                    same(got, part(other, (4 + other,)))

            into = np.zeros((ROWS, 3))
            whole = np.concatenate([part(10 * root + other) for other in range(size)])
            assert run(group.scatter, whole if rank == root else None, into, root) is into
            same(into, part(10 * root + rank))
            sent = [part(20 * root + other, (4 + other,)) for other in range(size)]
            into = np.zeros(4 + rank)
            run(group.scatter, sent if rank == root else None, into, root)
            same(into, part(20 * root + rank, (4 + rank,)))

        same(run(group.all_gather, parts[rank]), np.stack(parts))
        flat = np.zeros((size * ROWS, 3))
        assert run(group.all_gather, parts[rank], flat) is flat
        same(flat, np.concatenate(parts))
        listed = [np.zeros((ROWS + other, 3)) for other in range(size)]
        run(group.all_gather, part(rank, (ROWS + rank, 3)), listed)
        for other, got in enumerate(listed):
            same(got, part(other, (ROWS + other, 3)))

        # Rank a's block for rank b is number a * size + b.
        grid = [[part(a * size + b) for b in range(size)] for a in range(size)]
        due = np.add.reduce([grid[a][rank] for a in range(size)])
        whole = np.concatenate(grid[rank])
        same(run(group.reduce_scatter, whole), due)
        same(run(group.reduce_scatter, grid[rank]), due)
        into = np.zeros((ROWS, 3))
        assert run(group.reduce_scatter, whole, into) is into
        same(into, due)
        same(whole, np.concatenate(grid[rank]))

        flat = np.zeros((size * ROWS, 3))
        assert run(group.all_to_all, whole, flat) is flat
        same(flat, np.concatenate([grid[a][rank] for a in range(size)]))
        # Rank a sends a + 2b rows to rank b: from one array to one array, and from an array to a list.
        sends, receives = [rank + 2 * b for b in range(size)], [a + 2 * rank for a in range(size)]
        uneven = [[part(a * size + b, (a + 2 * b, 3)) for b in range(size)] for a in range(size)]
        whole, flat = np.concatenate(uneven[rank]), np.zeros((sum(receives), 3))
        run(group.all_to_all, whole, flat, send_rows=sends, receive_rows=receives)
        same(flat, np.concatenate([uneven[a][rank] for a in range(size)]))
        listed = [np.zeros((rows, 3)) for rows in receives]
        run(group.all_to_all, whole, listed, send_rows=sends)
        for a, got in enumerate(listed):
            same(got, uneven[a][rank])
        run(group.barrier)


@RANKS
@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_form_of_every_operation_gives_each_rank_its_result(size: int, asynchronous: bool) -> None:
    values(run_threads(every_form, size, asynchronous))


def many_at_once(rank: int, size: int, folder: str) -> None:
    with join(rank, size, folder) as group:
        # Only the last handle is kept: the engine must keep the other buffers alive.
        works = [group.all_reduce(part(rank + index, (2000,)), asynchronous=True) for index in range(50)][-1:]
        # A blocking call waits behind them.
        same(group.all_reduce(part(rank + 70, (9,))), np.add.reduce([part(other + 70, (9,)) for other in range(size)]))
        assert works[0].done
        expected = np.add.reduce([part(other + 49, (2000,)) for other in range(size)])
        same(works[0].wait(seconds(20)), expected)


def test_operations_without_a_wait_keep_their_buffers() -> None:
    values(run_threads(many_at_once, 2))


def late(rank: int, size: int, folder: str) -> None:
    store = FileStore(f"{folder}/store")
    with join(rank, size, f"{folder}/group") as group:
        mine = part(rank)
        if rank == 0:
            work = group.all_reduce(mine, asynchronous=True)
            assert not work.done
            with pytest.raises(TimeoutError, match="rank 0: the wait timed out: the operation is not done after"):
                work.wait(0.05)
            with pytest.raises(ValueError, match=r"rank 0: the operation is not done; call wait"):
                work.result  # noqa: B018 - reading it is the test
            store.set("go", b"")
            same(work.wait(), part(0) + part(1))
        else:
            store.get("go", 20)
            group.all_reduce(mine)


def test_a_wait_can_time_out_and_be_repeated() -> None:
    values(run_threads(late, 2))


def fails(rank: int, size: int, folder: str) -> str:
    with join(rank, size, folder) as group:
        work = group.all_reduce(part(0), asynchronous=True, timeout_s=0.2) if rank == 0 else None
        if work is None:
            time.sleep(0.6)
            return ""
        try:
            work.wait()
        except TimeoutError as error:
            assert work.done
            return f"{type(error).__name__}: {error}"
        return "nothing"


def test_a_handle_raises_its_operations_error() -> None:
    said = values(run_threads(fails, 2))[0]
    assert said.startswith("CollectiveTimeout: rank 0: all_reduce #1"), said


def refused(rank: int, size: int, folder: str) -> list[str]:
    said = []
    with join(rank, size, folder) as group:
        one, two = np.ones((5, 2)), np.ones((4, 2))
        read_only = np.ones(4)
        read_only.flags.writeable = False
        for call in (
            lambda: group.all_reduce(two, np.ones(7)),
            lambda: group.all_reduce(two, np.ones((4, 2), np.float32)),
            lambda: group.all_reduce(read_only),
            lambda: group.all_gather(two, read_only),
            lambda: group.reduce_scatter(one),
            lambda: group.all_to_all(two, np.ones((4, 2)), send_rows=[1, 2]),
            lambda: group.all_to_all(two, np.ones((4, 2)), send_rows=[5, -1]),
            lambda: group.all_to_all([two, two], [two, two], send_rows=[4, 4]),
            lambda: group.all_gather(two, [np.ones(8), np.ones(8, np.int64)]),
            lambda: group.reduce_scatter([two]),
        ):
            try:
                call()
                said.append("nothing")
            except (ValueError, TypeError) as error:
                said.append(f"{type(error).__name__}: {error}")
        group.all_reduce(two)
        assert (two == size).all(), "what was refused did nothing"
    return said


def test_invalid_forms_are_refused_in_a_sentence() -> None:
    words = (
        "ValueError: all_reduce: the buffer has 8 elements of f64, out 7 of f64",
        "ValueError: all_reduce: the buffer has 8 elements of f64, out 8 of f32",
        "ValueError: the array is read-only and cannot take a result",
        "ValueError: the array is read-only and cannot take a result",
        "ValueError: reduce_scatter: 5 rows cannot be cut into equal parts for 2 ranks",
        "ValueError: all_to_all: rows [1, 2] must be 2 numbers whose sum is the array's 4",
        "ValueError: all_to_all: rows [5, -1] must be 2 numbers",
        "ValueError: all_to_all: rows are for one array that is cut",
        "TypeError: all_gather: every array must be f64",
        "ValueError: reduce_scatter: needs 2 arrays, one a rank, not 1",
    )
    said = values(run_threads(refused, 2))[0]
    for text, start in zip(said, words, strict=True):
        assert text.startswith(start), (text, start)


def splits(rank: int, size: int, folder: str) -> tuple[int, list[int]]:
    with join(rank, size, folder) as group:
        # Odd ranks form a group in reverse order, so do even ranks; rank 4 joins none.
        half = group.split(None if rank == 4 else rank % 2, -rank)
        if half is None:
            nested = group.split(0, rank)
            assert nested is not None
            members = np.array([rank])
        else:
            with half:
                nested = group.split(0, rank)  # both groups are open, and used alternately
                assert nested is not None
                members = half.all_gather(np.array(rank))
                quarter = half.split(0)
                assert quarter is not None
                with quarter:
                    same(quarter.all_gather(np.array(rank)), members)
        with nested:
            same(nested.all_gather(np.array(rank)), np.arange(size))
        return (-1 if half is None else half.rank), members.tolist()


def test_a_split_makes_groups_by_color_in_the_order_of_the_keys() -> None:
    assert values(run_threads(splits, 5)) == [
        (1, [2, 0]),
        (1, [3, 1]),
        (0, [2, 0]),
        (0, [3, 1]),
        (-1, [4]),
    ]


def split_with_options(rank: int, size: int, folder: str) -> str:
    with join(rank, size, folder) as group:
        other = group.split(0, rank, options=Options(algorithm="ring", wire_dtype="bf16"))
        assert other is not None
        with other:
            return other.group.why("all_reduce", 1 << 20)


def test_a_split_can_have_its_own_options() -> None:
    for why in values(run_threads(split_with_options, 2)):
        assert why.startswith("ring (") and "bf16" in why
