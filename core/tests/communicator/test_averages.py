"""Averages of every type: no overflow where the average has none, and the same rule on every path.

The bits of averages of ordinary values are in test_host_algorithms.py and test_in_network.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hosts import apart
from ranks import RunningSwitch, run_threads, running_switch, values

from netfold import Communicator, FileStore, Options
from netfold._native import engine
from netfold.communicator.group import region

pytestmark = pytest.mark.native

FLOATS = {"f16": np.float16, "bf16": np.uint16, "f32": np.float32, "f64": np.float64}
INTEGERS = tuple(np.dtype(f"{sign}{width}") for sign in "iu" for width in (1, 2, 4, 8))
# Options of a group. The last three need a switch, or ranks on several hosts.
PATHS: dict[str, dict[str, Any]] = {
    "shared memory": {},
    **{
        name: {
            "algorithm": f"all_reduce={name},reduce={'tree' if name == 'tree' else 'direct'},reduce_scatter={scatter}"
        }
        for name, scatter in (
            ("ring", "ring"),
            ("halving_doubling", "halving_doubling"),
            ("tree", "direct"),
            ("direct", "direct"),
        )
    },
    "hierarchical": {"algorithm": "all_reduce=hierarchical,reduce=hierarchical,reduce_scatter=hierarchical"},
    "hierarchical by switch": {"algorithm": "all_reduce=hierarchical:in_network"},
    "switch": {"algorithm": "in_network"},
}
ON_ONE_HOST = [path for path in PATHS if "hierarchical" not in path and "switch" not in path]
LAYOUTS = [(0, 0, 1, 1), (0, 1, 1), (0, 1, 2, 2, 2, 1)]
COUNTS = (1, 353, 100_003)  # one post, one chunk, several


@pytest.fixture(scope="module")
def switch() -> Iterator[RunningSwitch]:
    with running_switch() as running:
        yield running


def join(rank: int, size: int, folder: str, path: str, wire: str = "auto", switch: str | None = None) -> Communicator:
    where = {} if path == "shared memory" or path not in ON_ONE_HOST else {"transport": "tcp"}
    options = Options(**PATHS[path], **where, wire_dtype=wire, probe="off", switch=switch)
    return Communicator(FileStore(folder), rank, size, options=options, timeout_s=20, join_timeout_s=20)


def native(group: Communicator, kind: str, dtype: str, given: list[Any], into: list[Any], op: str = "sum") -> None:
    """A call of any native type; averages where op is sum."""
    operation = group.group.submit(
        kind,
        dtype=dtype,
        reduce=op,
        average=op == "sum",
        inputs=[region(each) for each in given],
        outputs=[region(each) for each in into],
        timeout_s=20,
        wait_here=True,
    )
    group.group.wait(operation)


def by_every_operation(
    group: Communicator, dtype: str, mine: Any, expected: Any, check: Callable[[Any, Any, str], None], op: str = "sum"
) -> None:
    """all_reduce, reduce to the last rank and reduce_scatter of equal blocks."""
    whole = mine.copy()
    native(group, "all_reduce", dtype, [], [whole], op)
    check(whole, expected, "all_reduce")
    whole = mine.copy()
    native(group, "reduce", dtype, [], [whole], op)
    if group.rank == 0:
        check(whole, expected, "reduce")
    block = np.zeros_like(mine)
    native(group, "reduce_scatter", dtype, [mine] * group.size, [block], op)
    check(block, expected, "reduce_scatter")


def largest(dtype: str, count: int) -> Any:
    """3/4 of the least power of two that the type does not have, and its negative, in turn. Sums of 8 are exact."""
    if dtype == "bf16":
        return np.where(np.arange(count) % 2, 0xFF40, 0x7F40).astype(np.uint16)
    number = 1.5 * 2.0 ** (np.finfo(FLOATS[dtype]).maxexp - 1)
    return np.where(np.arange(count) % 2, -number, number).astype(FLOATS[dtype])


def averages(rank: int, size: int, folder: str, path: str, switch: str | None = None) -> None:
    with join(rank, size, folder, path, switch=switch) as group:
        for count in COUNTS:
            for dtype in FLOATS:
                mine = largest(dtype, count)

                def check(found: Any, expected: Any, kind: str, dtype: str = dtype, count: int = count) -> None:
                    np.testing.assert_array_equal(found, expected, err_msg=f"{kind} {dtype} {count}")

                by_every_operation(group, dtype, mine, mine, check)
            for kind in INTEGERS:
                parts = [(np.arange(count) * (7 * r + 3) - 20 * r).astype(kind) for r in range(size)]
                total = np.sum(parts, axis=0, dtype=kind)  # wraps, as the type does
                whole = [abs(each) // size * (1 if each >= 0 else -1) for each in total.tolist()]
                name = f"{kind.kind}{8 * kind.itemsize}"

                def check_integers(found: Any, expected: Any, operation: str, name: str = name) -> None:
                    np.testing.assert_array_equal(found, expected, err_msg=f"{operation} {name}")

                by_every_operation(group, name, parts[rank], np.array(whole, kind), check_integers)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("path", ON_ONE_HOST)
def test_the_average_of_equal_numbers_is_that_number_and_integers_round_toward_zero(path: str, size: int) -> None:
    values(run_threads(averages, size, path, timeout_s=60))


@pytest.mark.parametrize("size", [2, 3, 5])
def test_so_is_an_average_through_a_switch(size: int, switch: RunningSwitch) -> None:
    values(run_threads(averages, size, "switch", switch.endpoint, timeout_s=60))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("path", [path for path in PATHS if "hierarchical" in path])
def test_so_is_an_average_among_hosts_of_several_ranks(
    path: str, layout: tuple[int, ...], switch: RunningSwitch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*apart(layout))
    endpoint = switch.endpoint if "switch" in path else None
    values(run_threads(averages, len(layout), path, endpoint, timeout_s=60))


def wires(rank: int, size: int, folder: str, path: str, switch: str | None) -> None:
    for wire in ("bf16", "i32", "i8")[path == "direct" :]:
        with join(rank, size, f"{folder}/{wire}", path, wire, switch) as group:
            mine = np.full(5000, 3e38 if rank % 2 == 0 else 2.9e38, np.float32)
            group.all_reduce(mine, op="avg")
            np.testing.assert_allclose(mine, 2.96e38, rtol=0.02, err_msg=wire)


@pytest.mark.parametrize("path", [*ON_ONE_HOST[1:], "switch"])
def test_an_average_in_a_wire_format_does_not_overflow(path: str, switch: RunningSwitch) -> None:
    values(run_threads(wires, 5, path, switch.endpoint if path == "switch" else None))


def rounding(rank: int, size: int, folder: str, path: str) -> None:
    """Paths that reduce in one place round the f32 average once."""
    with join(rank, size, folder, path) as group:
        draw = np.random.default_rng(size)
        for count in COUNTS:
            parts = [draw.standard_normal(count).astype(np.float16) for _ in range(size)]
            total = parts[0].astype(np.float32)
            for part in parts[1:]:
                total += part.astype(np.float32)
            mine = parts[rank].copy()
            group.all_reduce(mine, op="avg")
            np.testing.assert_array_equal(mine, (total / np.float32(size)).astype(np.float16))


@pytest.mark.parametrize("path", ["shared memory", "direct"])
def test_a_half_precision_average_made_in_one_place_is_rounded_once(path: str) -> None:
    values(run_threads(rounding, 3, path))


TRUTHS = {
    "product": np.all,
    "min": np.all,
    "band": np.all,
    "sum": np.any,
    "max": np.any,
    "bor": np.any,
    "bxor": lambda parts, axis: np.sum(parts, axis) % 2 == 1,
}


def booleans(rank: int, size: int, folder: str, path: str, switch: str | None) -> None:
    bytes_ = np.array([0, 1, 2, 128, 255], np.uint8)
    with join(rank, size, folder, path, switch=switch) as group:
        for count in COUNTS:
            parts = [np.random.default_rng([count, r]).choice(bytes_, count) for r in range(size)]
            for op, truth in TRUTHS.items():
                expected = truth(np.array(parts) != 0, axis=0).astype(np.uint8)

                def check(found: Any, wanted: Any, kind: str, op: str = op, count: int = count) -> None:
                    np.testing.assert_array_equal(found, wanted, err_msg=f"{kind} {op} {count}")

                whole = parts[rank].copy()
                operation = group.group.submit(
                    "all_reduce", dtype="bool", reduce=op, outputs=[region(whole)], timeout_s=20, wait_here=True
                )
                group.group.wait(operation)
                check(whole, expected, "all_reduce")
                if op != "sum":
                    mine = parts[rank].copy()
                    group.all_reduce(mine.view(bool), op=op)
                    check(mine, expected, "Communicator.all_reduce")
            moved = parts[rank].copy()
            group.broadcast(moved.view(bool))
            check(moved, parts[0], "broadcast: bytes arrive unchanged")


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("path", [*ON_ONE_HOST, "switch"])
def test_any_byte_but_0_is_true_and_reductions_write_0_and_1(path: str, size: int, switch: RunningSwitch) -> None:
    values(run_threads(booleans, size, path, switch.endpoint if path == "switch" else None))


def refused(rank: int, size: int, folder: str) -> list[str]:
    texts = []
    with join(rank, size, folder, "direct") as group:
        for dtype in ("bool", "f64_i64"):
            with pytest.raises(ValueError) as error:
                native(group, "all_reduce", dtype, [], [np.zeros(4, np.uint64)])
            texts.append(str(error.value))
    return texts


def test_pairs_and_booleans_have_no_average() -> None:
    assert (
        values(run_threads(refused, 2))
        == [
            [
                "all_reduce: avg is not defined for bool; max is any, min all",
                "all_reduce: sum is not defined for f64_i64",
            ]
        ]
        * 2
    )
    assert engine.DTYPES["bool"] == 14
