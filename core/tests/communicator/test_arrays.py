"""Arrays that can be sent, and their dtypes: NumPy's, and any framework's by DLPack or the buffer protocol."""

from __future__ import annotations

import array
from typing import Any

import numpy as np
import pytest
from ranks import run_threads, values
from reductions import contribution

from netfold import Communicator, FileStore

pytestmark = pytest.mark.native


class Foreign:
    """An array of another framework, with DLPack only."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __dlpack__(self, **options: Any) -> Any:
        return self.held.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.held.__dlpack_device__()


class Old(Foreign):
    """An array from before DLPack 1.0, which cannot say whether it is writable, like JAX's immutable arrays."""

    def __dlpack__(self, max_version: Any = None) -> Any:
        return self.held.__dlpack__()


def join(rank: int, size: int, folder: str) -> Communicator:
    return Communicator(FileStore(folder), rank, size, timeout_s=20, join_timeout_s=20)


def numbers(rank: int, size: int, folder: str) -> None:
    with join(rank, size, folder) as group:
        # A million is beyond the direct exchange: a ring.
        for count in (1, 1000, 1_000_003):
            for dtype in (np.complex64, np.complex128):
                real = dtype().real.dtype.name
                parts = [
                    (contribution(r, count, real) + 1j * contribution(r + 9, count, real)).astype(dtype)
                    for r in range(size)
                ]
                for op, expected in (("sum", parts[0] + parts[1]), ("avg", (parts[0] + parts[1]) / 2)):
                    mine = parts[rank].copy()
                    group.all_reduce(mine, op=op)
                    np.testing.assert_array_equal(mine, expected.astype(dtype), strict=True)
                moved = parts[rank].copy()
                group.broadcast(moved, 1)
                np.testing.assert_array_equal(moved, parts[1], strict=True)
            bools = [contribution(r, count, "uint8") % 3 == 0 for r in range(size)]
            for op, reference in (
                ("max", np.logical_or), ("bor", np.logical_or), ("min", np.logical_and), ("band", np.logical_and),
                ("product", np.logical_and), ("bxor", np.logical_xor),
            ):  # fmt: skip
                mine = bools[rank].copy()
                group.all_reduce(mine, op=op)
                np.testing.assert_array_equal(mine, reference(*bools), strict=True)
            np.testing.assert_array_equal(group.all_gather(bools[rank]), np.stack(bools), strict=True)


def test_complex_numbers_and_bools_are_sent_as_views() -> None:
    values(run_threads(numbers, 2))


def foreign(rank: int, size: int, folder: str) -> None:
    with join(rank, size, folder) as group:
        parts = [contribution(r, 999, "float32").reshape(3, 333) for r in range(size)]
        mine = parts[rank].copy()
        wrapped = Foreign(mine)
        assert group.all_reduce(wrapped) is wrapped
        np.testing.assert_array_equal(mine, parts[0] + parts[1])
        # An immutable array is an input; the result goes into `out`.
        held = parts[rank].copy()
        held.flags.writeable = False
        for immutable in (Foreign(held), Old(parts[rank].copy())):
            out = np.zeros((3, 333), np.float32)
            group.all_reduce(immutable, out)
            np.testing.assert_array_equal(out, parts[0] + parts[1])
            gathered = group.all_gather(immutable)
            np.testing.assert_array_equal(gathered, np.stack(parts), strict=True)
        with pytest.raises(BufferError):  # NumPy's own error
            group.all_reduce(Old(held))
        with pytest.raises(ValueError, match=r"Old cannot take a result: its DLPack export does not say"):
            group.all_reduce(Old(parts[rank].copy()))
        with pytest.raises(ValueError, match=r"Foreign .*read-only"):
            group.all_reduce(Foreign(held))
        with pytest.raises(ValueError, match="bytes is read-only"):
            group.broadcast(b"12345678", root=1 - rank)
        with pytest.raises(ValueError, match="must be C-contiguous"):
            group.all_reduce(Foreign(np.ones((4, 4))[:, ::2]))
        with pytest.raises(TypeError, match="list is no array"):
            group.all_reduce([1.0, 2.0])
        with pytest.raises(TypeError, match="float32 in the other byte order cannot travel"):
            group.all_reduce(np.ones(4, ">f4"))
        doubles = array.array("d", [1.0 + rank, 5.0])
        group.all_reduce(doubles)
        assert doubles.tolist() == [3.0, 10.0]


def test_any_array_with_dlpack_is_sent_in_place() -> None:
    values(run_threads(foreign, 2))


def brain_floats(rank: int, size: int, folder: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with join(rank, size, folder) as group:
        for count in (3, 100_000):
            parts = [contribution(r, count, "float32").astype(ml_dtypes.bfloat16) for r in range(size)]
            wide = parts[0].astype(np.float32) + parts[1].astype(np.float32)
            for mine in (parts[rank].copy(),):
                group.all_reduce(mine)
                np.testing.assert_array_equal(mine, wide.astype(ml_dtypes.bfloat16), strict=True)
            gathered = group.all_gather(parts[rank])
            np.testing.assert_array_equal(gathered, np.stack(parts), strict=True)


def test_bf16_is_sent_as_bf16() -> None:
    pytest.importorskip("ml_dtypes", reason="bf16 for NumPy comes with ml_dtypes")
    values(run_threads(brain_floats, 2))


def short_way(rank: int, size: int, folder: str) -> None:
    with join(rank, size, folder) as group:
        submits = []
        submit = group.group.submit
        group.group.submit = lambda kind, **call: submits.append(kind) or submit(kind, **call)  # type: ignore[method-assign]
        for dtype in ("f4", "f8", "f2", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"):
            for shape in ((), (0,), (3,), (2, 3)):
                mine = np.full(shape, 1 + rank, dtype)
                group.all_reduce(mine)
                assert (mine == 3).all() and mine.dtype == dtype
        assert submits == [], "these take the short way"
        with pytest.raises(ValueError, match="all_reduce: bxor is not defined for f32"):
            group.all_reduce(np.ones(3, np.float32), op="bxor")
        with pytest.raises(ValueError, match="no operator 'min_loc'"):
            group.all_reduce(np.ones(3, np.float32), op="min_loc")
        group.all_reduce(np.ones(3, bool), op="max")
        assert submits == ["all_reduce"]
    with pytest.raises(ValueError, match="this group was closed"):
        group.all_reduce(np.ones(3))


def test_the_fast_path_for_plain_numbers_has_the_same_results_and_errors() -> None:
    values(run_threads(short_way, 2))
