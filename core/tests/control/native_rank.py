"""A rank of a job that joins its switch by the native client, driven by the calling thread."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
from load import seconds

from netfold._native import engine
from netfold._native_dev import control

TABLE = 0x5A17  # the hash of a choice table, the same on all ranks


def fields(
    rank: int,
    size: int,
    endpoint: str,
    *,
    job: str,
    token_file: str = "",
    security: str = "none",
    timeout_s: float = 20.0,
    window_bytes: int = 1 << 20,
    tree: Any = None,
) -> dict[str, Any]:
    """Return the fields of a request to the switch at `endpoint`."""
    return {
        "endpoint": endpoint,
        "token_file": token_file,
        "job": job,
        "rank": rank,
        "ranks": list(range(size)),
        "window_bytes": window_bytes,
        "security": security,
        "timeout_s": timeout_s,
        "tree": msgpack.packb(tree),
    }


def join(rank: int, size: int, endpoint: str, **others: Any) -> Any:
    return control.join(**fields(rank, size, endpoint, **others))


def add(member: Any, array: Any, sequence: int, timeout_s: float = 30.0) -> None:
    dtype = engine.DTYPES[{"float32": "f32", "int32": "i32"}[array.dtype.name]]
    member.all_reduce(array.ctypes.data, array.nbytes, dtype, 0, sequence, TABLE, int(seconds(timeout_s) * 1e9))


def part(rank: int, count: int, turn: int, dtype: str = "float32") -> Any:
    """A rank's array: whole numbers, whose sums are exact."""
    return np.random.default_rng([rank, count, turn]).integers(-1000, 1000, count).astype(dtype)


def total(size: int, count: int, turn: int, dtype: str = "float32") -> Any:
    return sum(part(rank, count, turn, dtype) for rank in range(size))
