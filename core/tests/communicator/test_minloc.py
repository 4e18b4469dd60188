"""min_loc and max_loc: the extreme value and the lowest index that has it, over ranks, algorithms and dtypes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from ranks import run_threads, running_switch, values
from reductions import contribution

from netfold import Communicator, FileStore, Options
from netfold._native import kernels

pytestmark = pytest.mark.native

OPS = ("min_loc", "max_loc")
DTYPES = (
    "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool",
)  # fmt: skip


def located(op: str, parts: list[Any], indices: list[Any]) -> tuple[Any, Any]:
    """The expected result in NumPy, element by element over ranks."""
    values_of, indices_of = np.stack(parts), np.stack(indices)
    nan = np.isnan(values_of) if values_of.dtype.kind == "f" else np.zeros(values_of.shape, bool)
    best = values_of.min(axis=0) if op == "min_loc" else values_of.max(axis=0)  # NaN where there is one
    candidate = np.where(nan.any(axis=0), nan, values_of == best)
    return best, np.where(candidate, indices_of, np.iinfo(np.int64).max).min(axis=0)


def pairs(values_: list[float], indices: list[int], dtype: str) -> Any:
    made = np.empty(len(values_), [("value", dtype), ("index", np.int64)])
    made["value"], made["index"] = values_, indices
    return made


@pytest.mark.parametrize("isa", kernels.available_isas())
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_kernel_takes_the_lowest_index_of_equal_values_in_any_order(order: tuple[int, ...], isa: str) -> None:
    nan, inf = np.nan, np.inf
    sources = [
        pairs([5, 1, nan, inf, 0.0, nan, -inf, 2], [7, 9, 3, 1, 5, 8, 2, 0], "f8"),
        pairs([5, 1, 0.0, inf, -0.0, nan, nan, 3], [4, 9, 0, 0, 6, 6, 9, 0], "f8"),
        pairs([5, 2, -inf, 1, 0.0, nan, 0.0, 1], [6, 1, 1, 2, 4, 7, 1, 0], "f8"),
    ]
    for op, expected in (
        ("min_loc", pairs([5, 1, nan, 1, 0.0, nan, nan, 1], [4, 9, 3, 2, 4, 6, 9, 0], "f8")),
        ("max_loc", pairs([5, 2, nan, inf, 0.0, nan, nan, 3], [4, 1, 3, 0, 4, 6, 9, 0], "f8")),
    ):
        total = np.zeros(8, np.complex128)  # 16 bytes per element
        kernels.reduce(op, "f64_i64", total, [sources[i].view(np.complex128) for i in order], isa)
        got = total.view(expected.dtype)
        np.testing.assert_array_equal(got["index"], expected["index"])
        np.testing.assert_array_equal(got["value"], expected["value"])


def test_pairs_have_only_the_loc_operators_and_other_values_have_none() -> None:
    for op in ("sum", "product", "min", "max", "band", "bor", "bxor"):
        assert not kernels.is_defined(op, "f64_i64") and not kernels.is_defined(op, "i64_i64")
    for op in OPS:
        assert kernels.is_defined(op, "f64_i64") and kernels.is_defined(op, "i64_i64")
        assert not kernels.is_defined(op, "f64") and not kernels.is_defined(op, "i64")


def everywhere(rank: int, size: int, folder: str, algorithm: str, switch: str | None) -> None:
    options = Options(algorithm=algorithm, switch=switch)
    with Communicator(FileStore(folder), rank, size, options=options, timeout_s=20, join_timeout_s=20) as group:
        for dtype in DTYPES:
            for count in (0, 1, 353, 50_001):
                parts = [contribution(r, count, "uint8" if dtype == "bool" else dtype) for r in range(size)]
                if dtype == "bool":
                    parts = [part % 5 == 0 for part in parts]
                # Many equal values, and indices in another order.
                parts = [np.where(np.arange(count) % 3 == 0, parts[0], part) for part in parts]
                indices = [(np.arange(count) * 31 + (size - r) * 7919) % 100_003 for r in range(size)]
                if dtype.startswith("float") and count > 1:
                    for r, part in enumerate(parts):
                        part[7 + r] = np.nan
                        part[100:103] = np.nan
                for op in OPS:
                    mine, where = parts[rank].copy(), indices[rank].astype(np.int32)
                    got = group.all_reduce_loc(mine, where, op=op)
                    assert got[0] is mine and got[1] is where
                    expected = located(op, parts, indices)
                    np.testing.assert_array_equal(mine, expected[0], strict=True)
                    np.testing.assert_array_equal(where, expected[1])


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("algorithm", ["auto", "direct", "ring"])
def test_every_algorithm_finds_the_value_and_its_lowest_index(algorithm: str, size: int) -> None:
    values(run_threads(everywhere, size, algorithm, None))


def test_the_switch_finds_the_value_and_its_lowest_index() -> None:
    with running_switch() as switch:
        values(run_threads(everywhere, 3, "in_network", switch.endpoint))


def refused(rank: int, size: int, folder: str) -> None:
    with Communicator(FileStore(folder), rank, size, timeout_s=20, join_timeout_s=20) as group:
        floats, indices = np.ones(3), np.arange(3)
        for error, words, values_, where, op in (
            (ValueError, "no operator 'max'; there are min_loc, max_loc", floats, indices, "max"),
            (TypeError, "indices must be integers that fit int64, not float64", floats, floats, "max_loc"),
            (ValueError, r"values have the shape \(3,\), indices \(2,\)", floats, indices[:2], "max_loc"),
            (TypeError, "values of complex64 have no order", floats.astype("c8"), indices, "max_loc"),
            (TypeError, "values must be a NumPy array, not list", [1.0], indices, "max_loc"),
        ):
            with pytest.raises(error, match=words):
                group.all_reduce_loc(values_, where, op=op)


def test_invalid_pairs_are_refused_in_a_sentence() -> None:
    values(run_threads(refused, 2))
