"""Every operation through the switch, in each of its forms, has the bits of the host algorithms. Ranks that make
different calls get an error that names both calls."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hosts import apart
from load import seconds
from ranks import RunningSwitch, run_threads, running_switch, values
from reductions import FLOAT_OPS, INTEGER_OPS, by_rank, contribution

from netfold import Communicator, FileStore, Options
from netfold._native import engine
from netfold.communicator.group import region
from netfold.switch_protocol import control_messages

THROUGH = ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather", "barrier")
RANKS = pytest.mark.parametrize("size", [2, 3, 4])
# A chunk is 352 values of 4 bytes: none, one, one more or less than a chunk, and several windows with a tail.
SIZES = (0, 1, 351, 352, 353, 20_011)
DTYPES = ("float32", "float64", "float16", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


@pytest.fixture(scope="module")
def switch() -> Iterator[RunningSwitch]:
    with running_switch() as running:
        yield running


@pytest.fixture
def short_packets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short packets, as over Ethernet: an operation has many."""
    monkeypatch.setattr(control_messages, "PAYLOAD_CANDIDATES", (1408,))


def join(rank: int, size: int, folder: str, endpoint: str, timeout_s: float = 20.0, **options: str) -> Communicator:
    settings = Options(switch=endpoint, probe="off", **({"algorithm": "in_network"} | options))
    return Communicator(FileStore(folder), rank, size, options=settings, timeout_s=timeout_s, join_timeout_s=20)


def same(got: Any, expected: Any, what: str = "") -> None:
    """Compare bits, NaN payloads and signs of zeros included."""
    assert got.dtype == expected.dtype and got.shape == expected.shape, what
    differ = np.flatnonzero(np.frombuffer(got.tobytes(), np.uint8) != np.frombuffer(expected.tobytes(), np.uint8))
    assert len(differ) == 0, f"{what}: byte {differ[0]} of {got.nbytes} differs"


def any_bits(rank: int, count: int, dtype: str) -> Any:
    """All bit patterns of the dtype, NaNs included."""
    bits = np.random.default_rng(1000 * rank + count).integers(0, 256, count * np.dtype(dtype).itemsize, np.uint8)
    return bits.view(dtype)


def moves(group: Communicator, dtype: str, count: int) -> None:
    what = f"{dtype} {count}"
    for root in range(group.size):
        mine = any_bits(group.rank, count, dtype)
        group.broadcast(mine, root)
        same(mine, any_bits(root, count, dtype), f"broadcast {what} from {root}")
    for uneven in (0, 7):
        counts = [count + uneven * ((3 * rank) % 5) for rank in range(group.size)]
        into = [np.zeros(each, dtype) for each in counts]
        given = any_bits(group.rank, counts[group.rank], dtype)
        group.all_gather(given, into)
        for rank, got in enumerate(into):
            same(got, any_bits(rank, counts[rank], dtype), f"all_gather {what} of {rank}")
    # In place: a rank's own block is at its position in the output.
    flat = np.zeros(group.size * count, dtype)
    own = flat[group.rank * count : (group.rank + 1) * count]
    own[:] = any_bits(group.rank, count, dtype)
    group.all_gather(own, flat)
    same(flat, np.concatenate([any_bits(rank, count, dtype) for rank in range(group.size)]), f"in place {what}")


def reduces(group: Communicator, op: str, dtype: str, count: int) -> None:
    what, size = f"{op} {dtype} {count}", group.size
    wire = "f16" if dtype == "float16" else "f32"  # the switch rounds a sum before workers divide it
    parts = [contribution(rank, count, dtype) for rank in range(size)]
    due = by_rank(op, parts, wire)
    mine = parts[group.rank].copy()
    group.all_reduce(mine, op=op)
    same(mine, due, f"all_reduce {what}")
    for root in range(size):
        mine = parts[group.rank].copy()
        group.reduce(mine, root, op=op)
        same(mine, due if group.rank == root else parts[group.rank], f"reduce {what} to {root}")
    for uneven in (0, 7):
        counts = [count + uneven * ((3 * rank) % 5) for rank in range(size)]
        given = [contribution(group.rank * size + rank, counts[rank], dtype) for rank in range(size)]
        kept = [each.copy() for each in given]
        own = [contribution(rank * size + group.rank, counts[group.rank], dtype) for rank in range(size)]
        into = np.zeros(counts[group.rank], dtype)
        group.reduce_scatter(given, into, op=op)
        same(into, by_rank(op, own, wire), f"reduce_scatter {what}")
        for was, is_now in zip(kept, given, strict=True):
            same(is_now, was, f"reduce_scatter {what} writes to its inputs")
        group.reduce_scatter(given, given[group.rank], op=op)
        same(given[group.rank], by_rank(op, own, wire), f"reduce_scatter in place {what}")


def every_operation(rank: int, size: int, folder: str, endpoint: str) -> set[int]:
    with join(rank, size, folder, endpoint) as group:
        for dtype in DTYPES:
            for count in SIZES:
                moves(group, dtype, count)
                reduces(group, "sum", dtype, count)
            for op in FLOAT_OPS if dtype.startswith("float") else INTEGER_OPS:
                reduces(group, op, dtype, 1009)
            group.barrier()
        return {int(event["algorithm"]) for event in group.group.events()}


@RANKS
@pytest.mark.usefixtures("short_packets")
def test_every_operation_gives_the_bits_of_the_host_algorithms(switch: RunningSwitch, size: int) -> None:
    found = values(run_threads(every_operation, size, switch.endpoint, timeout_s=120))
    assert found == [{engine.ALGORITHMS["in_network"]}] * size


def every_shape_of_packet(rank: int, size: int, folder: str, endpoint: str) -> None:
    with join(rank, size, folder, endpoint) as group:
        for count in (8191, 8192, 8193, 300_007):
            moves(group, "uint8", count)
            reduces(group, "sum", "float32", count)


def test_long_packets_carry_blocks_of_several_ranks(switch: RunningSwitch) -> None:
    values(run_threads(every_shape_of_packet, 3, switch.endpoint, timeout_s=60))


PAIR = np.dtype([("value", np.float64), ("index", np.int64)])


def located(rank: int, size: int, folder: str, endpoint: str) -> None:
    """min_loc and max_loc in the operations that reduce, and pairs in those that only move values."""
    with join(rank, size, folder, endpoint) as group:

        def run(kind: str, op: str, inputs: list[Any], outputs: list[Any], root: int = 0) -> None:
            work = group.group.submit(
                kind,
                dtype="f64_i64",
                reduce=op,
                root=root,
                inputs=[region(each) for each in inputs],
                outputs=[region(each) for each in outputs],
                timeout_s=20,
                wait_here=True,
            )
            group.group.wait(work)

        def pairs(of: int, count: int, block: int = 0) -> Any:
            made = np.empty(count, PAIR)
            made["value"] = np.random.default_rng(10 * of + block).integers(-5, 5, count)  # with many ties
            made["value"][:1] = np.nan if of == 1 else 0.0
            made["index"] = 1000 * of + np.arange(count)
            return made

        def due(op: str, count: int, block: int = 0) -> Any:
            all_pairs = np.stack([pairs(of, count, block) for of in range(size)])
            chosen = (np.argmin if op == "min_loc" else np.argmax)(all_pairs["value"], axis=0)
            return all_pairs[chosen, np.arange(count)]

        for op, count in itertools.product(("min_loc", "max_loc"), (1, 87, 88, 89, 5003)):
            mine = pairs(rank, count)
            run("all_reduce", op, [], [mine])
            same(mine, due(op, count))
            for root in range(size):
                mine = pairs(rank, count)
                run("reduce", op, [], [mine], root)
                same(mine, due(op, count) if rank == root else pairs(rank, count))
            into = np.empty(count + rank, PAIR)
            run("reduce_scatter", op, [pairs(rank, count + to, to) for to in range(size)], [into])
            same(into, due(op, count + rank, rank))
        mine = pairs(rank, 89)
        run("broadcast", "sum", [], [mine], size - 1)
        same(mine, pairs(size - 1, 89))
        blocks = [np.empty(89 + of, PAIR) for of in range(size)]
        run("all_gather", "sum", [pairs(rank, 89 + rank)], blocks)
        for of, got in enumerate(blocks):
            same(got, pairs(of, 89 + of))


@RANKS
@pytest.mark.usefixtures("short_packets")
def test_pairs_are_reduced_by_place_and_moved_whole(switch: RunningSwitch, size: int) -> None:
    values(run_threads(located, size, switch.endpoint))


def not_finite(rank: int, size: int, folder: str, endpoint: str) -> None:
    with join(rank, size, folder, endpoint) as group:
        for dtype in ("float32", "float64", "float16"):
            base = np.ones(1000, dtype)
            if rank == 0:
                base[[3, 400]] = np.inf, np.inf
            if rank == 1:
                base[[3, 999]] = -np.inf, np.nan
            due = np.full(1000, float(size), dtype)
            due[[3, 400, 999]] = np.nan, np.inf, np.nan
            mine = base.copy()
            group.reduce(mine, 1)
            np.testing.assert_array_equal(mine, due if rank == 1 else base)
            into = group.reduce_scatter([base] * size)
            np.testing.assert_array_equal(into, due)


def test_infinities_and_nans_come_out_as_a_float_sum_has_them(switch: RunningSwitch) -> None:
    values(run_threads(not_finite, 3, switch.endpoint))


def streamed(rank: int, size: int, folder: str, endpoint: str) -> None:
    """Many operations at once through one window, checked when all are under way."""
    with join(rank, size, folder, endpoint) as group:
        due = []
        for index in range(60):
            count = 1 + 131 * index % 4001
            parts = [contribution(other + index, count, "float32") for other in range(size)]
            root = index % size
            mine = parts[rank].copy()
            if index % 5 == 0:
                due.append((group.broadcast(mine, root, asynchronous=True), mine, parts[root]))
            elif index % 5 == 1:
                expected = by_rank("sum", parts) if rank == root else parts[rank]
                due.append((group.reduce(mine, root, asynchronous=True), mine, expected))
            elif index % 5 == 2:
                into = np.zeros(size * count, np.float32)
                due.append((group.all_gather(mine, into, asynchronous=True), into, np.concatenate(parts)))
            elif index % 5 == 3:
                into = np.zeros(count, np.float32)
                due.append((group.reduce_scatter([mine] * size, into, asynchronous=True), into, by_rank("sum", parts)))
            else:
                due.append((group.all_reduce(mine, op="avg", asynchronous=True), mine, by_rank("avg", parts)))
            if index % 7 == 0:
                due.append((group.barrier(asynchronous=True), np.zeros(0), np.zeros(0)))
        for work, got, expected in due:
            work.wait(seconds(20))
            same(got, expected)


@pytest.mark.usefixtures("short_packets")
def test_operations_of_every_kind_stream_through_one_window(switch: RunningSwitch) -> None:
    values(run_threads(streamed, 3, switch.endpoint))


def with_parts(rank: int, size: int, folder: str, endpoint: str) -> None:
    with join(rank, size, folder, endpoint) as group:
        part = group.split(rank % 2)
        assert part is not None
        with part:
            members = range(rank % 2, size, 2)
            under_way: list[tuple[Any, Any, Any]] = []
            for index in range(12):
                of_all, of_part = contribution(rank, 3001, "float64"), contribution(rank + 9, 1501, "int32")
                under_way.append(
                    (
                        group.all_reduce(of_all, asynchronous=True),
                        of_all,
                        by_rank("sum", [contribution(other, 3001, "float64") for other in range(size)]),
                    )
                )
                root = index % part.size
                under_way.append(
                    (
                        part.broadcast(of_part, root, asynchronous=True),
                        of_part,
                        contribution(members[root] + 9, 1501, "int32"),
                    )
                )
                summed = contribution(rank + index, 777, "float32")
                parts = [contribution(other + index, 777, "float32") for other in members]
                under_way.append((part.all_reduce(summed, op="max", asynchronous=True), summed, by_rank("max", parts)))
                under_way.append((group.barrier(asynchronous=True), np.zeros(0), np.zeros(0)))
            for work, got, expected in under_way:
                work.wait(seconds(20))
                same(got, expected)
            assert part.group.traffic()["packets_sent"] > 0


def test_splits_of_a_group_are_separate_jobs(switch: RunningSwitch) -> None:
    values(run_threads(with_parts, 4, switch.endpoint))
    switch.wait_for(r"starts with 4 workers")
    assert len(switch.wait_for(r"starts with 2 workers", count=2)) >= 2


# --- hosts of several ranks ---

LAYOUTS = [(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 1), (0, 1, 1), (0, 1, 2, 2, 2, 1)]


def on_hosts(rank: int, size: int, folder: str, endpoint: str, layout: tuple[int, ...]) -> dict[str, str]:
    operations = ",".join(f"{operation}=hierarchical" for operation in THROUGH)
    with join(rank, size, folder, endpoint, algorithm=operations) as group:
        table = group.group.table.rows
        through = {row.operation: row.between for row in table if row.operation in THROUGH and row.min_bytes == 0}
        for count in (0, 1, 1009, 50_021):
            for root in range(size):
                mine = any_bits(rank, count, "float32")
                group.broadcast(mine, root)
                same(mine, any_bits(root, count, "float32"), f"broadcast {count} from {root}")
                mine = contribution(rank, count, "int64")
                group.reduce(mine, root)
                parts = [contribution(other, count, "int64") for other in range(size)]
                same(mine, by_rank("sum", parts) if rank == root else parts[rank], f"reduce {count} to {root}")
            whole = contribution(rank, count, "float64")
            group.reduce(whole, size - 1, op="avg")
            if rank == size - 1:
                parts = [contribution(other, count, "float64") for other in range(size)]
                np.testing.assert_allclose(whole, np.mean(parts, axis=0), rtol=1e-12, atol=1e-12)
            blocks = [np.zeros(count + 3 * other, np.float32) for other in range(size)]
            group.all_gather(any_bits(rank, count + 3 * rank, "float32"), blocks)
            for other, got in enumerate(blocks):
                same(got, any_bits(other, count + 3 * other, "float32"), f"all_gather {count}")
            given = [contribution(rank * size + other, count + 3 * other, "int32") for other in range(size)]
            into = group.reduce_scatter(given)
            same(into, by_rank("sum", [contribution(of * size + rank, len(into), "int32") for of in range(size)]))
        group.barrier()
        return through


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_first_ranks_lead_their_hosts_whichever_rank_is_the_root(
    monkeypatch: pytest.MonkeyPatch, switch: RunningSwitch, layout: tuple[int, ...]
) -> None:
    monkeypatch.setattr(*apart(layout))
    # Use the switch between hosts, whatever the cost model predicts for so few ranks.
    monkeypatch.setattr("netfold.tuning.choice_table.best_between", lambda operation, case: "in_network")
    from netfold.tuning.choice_table import build_table

    build_table.cache_clear()
    try:
        found = values(run_threads(on_hosts, len(layout), switch.endpoint, layout, timeout_s=60))
    finally:
        build_table.cache_clear()
    assert found == [dict.fromkeys(THROUGH, "in_network")] * len(layout)


# --- wrong calls ---

Call = Callable[[Communicator], Any]


def ones(count: int = 100, dtype: str = "float32") -> Any:
    return np.ones(count, dtype)


def calls_once(rank: int, size: int, folder: str, endpoint: str, calls: list[Call]) -> tuple[str, str]:
    with join(rank, size, folder, endpoint) as group:
        try:
            calls[rank](group)
            group.barrier()
        except Exception as error:
            return type(error).__name__, str(error)
    return "", ""


def gathers(counts: list[int]) -> Call:
    return lambda group: group.all_gather(ones(counts[group.rank]), [ones(count) for count in counts])


DIFFERENT = {
    "sum against avg": (
        lambda group: group.all_reduce(ones()),
        lambda group: group.all_reduce(ones(), op="avg"),
        ("all_reduce #1 of 100 f32 (sum)", "all_reduce #1 of 100 f32 (avg)"),
    ),
    "roots of a broadcast": (
        lambda group: group.broadcast(ones(), 0),
        lambda group: group.broadcast(ones(), 1),
        ("broadcast #1 of 100 f32 (root 0)", "broadcast #1 of 100 f32 (root 1)"),
    ),
    "roots of a reduce": (
        lambda group: group.reduce(ones(), 1),
        lambda group: group.reduce(ones(), 0),
        ("reduce #1 of 100 f32 (sum, root 1)", "reduce #1 of 100 f32 (sum, root 0)"),
    ),
    "a reduce against an all_reduce": (
        lambda group: group.all_reduce(ones()),
        lambda group: group.reduce(ones(), 0),
        ("all_reduce #1 of 100 f32 (sum)", "reduce #1 of 100 f32 (sum, root 0)"),
    ),
    "sums of a reduce": (
        lambda group: group.reduce(ones(), 1),
        lambda group: group.reduce(ones(), 1, op="avg"),
        ("reduce #1 of 100 f32 (sum, root 1)", "reduce #1 of 100 f32 (avg, root 1)"),
    ),
    "a barrier against a bitwise or of one byte": (
        lambda group: group.barrier(),
        lambda group: group.all_reduce(ones(1, "uint8"), op="bor"),
        ("barrier #1", "all_reduce #1 of 1 u8 (bor)"),
    ),
    "a broadcast against a bitwise or of its bits": (
        lambda group: group.broadcast(ones(), 0),
        lambda group: group.all_reduce(ones(100, "uint32"), op="bor"),
        ("broadcast #1 of 100 f32 (root 0)", "all_reduce #1 of 100 u32 (bor)"),
    ),
    "dtypes of one width": (
        lambda group: group.broadcast(ones(100, "int32"), 0),
        lambda group: group.broadcast(ones(100, "float32"), 0),
        ("broadcast #1 of 100 i32 (root 0)", "broadcast #1 of 100 f32 (root 0)"),
    ),
    "types that travel as one dtype": (
        lambda group: group.broadcast(ones(100, "bool"), 0),
        lambda group: group.broadcast(ones(100, "uint8"), 0),
        ("broadcast #1 of 100 bool (root 0)", "broadcast #1 of 100 u8 (root 0)"),
    ),
    "complex numbers against their parts": (
        lambda group: group.all_reduce(ones(50, "complex64")),
        lambda group: group.all_reduce(ones(100, "float32")),
        ("all_reduce #1 of 50 c64 (sum)", "all_reduce #1 of 100 f32 (sum)"),
    ),
    "sizes of a broadcast": (
        lambda group: group.broadcast(ones(100), 0),
        lambda group: group.broadcast(ones(10_000), 0),
        ("broadcast #1 of 100 f32 (root 0)", "broadcast #1 of 10000 f32 (root 0)"),
    ),
    "blocks of a gather that come to the same sum": (
        gathers([100, 120, 80]),
        gathers([110, 120, 70]),
        ("all_gather #1 of f32 (digest of all sizes: ", "all_gather #1 of f32 (digest of all sizes: "),
    ),
    "a gather against a scatter": (
        gathers([100, 100, 100]),
        lambda group: group.reduce_scatter([ones()] * 3),
        ("all_gather #1 of f32 (digest of all sizes: ", "reduce_scatter #1 of f32 (digest of all sizes: "),
    ),
}


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_make_different_calls_get_the_call_of_each(switch: RunningSwitch, name: str, odd: int) -> None:
    usual, other, (usually, otherwise) = DIFFERENT[name]
    calls = [other if rank == odd else usual for rank in range(3)]
    found = values(run_threads(calls_once, 3, switch.endpoint, calls))
    assert all(error in ("Mismatch", "PeerLost") for error, _ in found), found
    said = {rank: text for rank, (error, text) in enumerate(found) if error == "Mismatch"}
    assert said
    for rank, text in said.items():
        theirs, ours = re.search(
            r"is in (.*), wire \w+, this rank \d in (.*), wire \w+; every rank must", text
        ).groups()  # type: ignore[union-attr]
        own, others = (otherwise, usually) if rank == odd else (usually, otherwise)
        assert ours.startswith(own) and theirs.startswith(others), text
        assert f"this rank {rank} in" in text
