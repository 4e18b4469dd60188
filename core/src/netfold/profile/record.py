"""The event record: one fixed-size struct for each operation."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

# Times are CLOCK_MONOTONIC nanoseconds (time.perf_counter_ns on Linux). bytes: of the tensor. wire_bytes: sent by this
# rank, including headers and retransmissions, without lower layers' headers.
RECORD = np.dtype(
    [
        ("group", "u8"),
        ("bytes", "u8"),
        ("wire_bytes", "u8"),
        ("queued_ns", "i8"),
        ("started_ns", "i8"),
        ("finished_ns", "i8"),
        ("sequence", "u4"),
        ("retransmissions", "u4"),
        ("registration_hits", "u4"),
        ("registration_misses", "u4"),
        ("slowest_rank", "i4"),
        ("operation", "u1"),
        ("dtype", "u1"),
        ("reduce", "u1"),
        ("algorithm", "u1"),
        ("wire", "u1"),
        ("error", "u1"),
        ("inlined", "u1"),
        ("reserved", "u1"),
        ("reserved2", "u4"),
    ]
)

Records: TypeAlias = "np.ndarray[Any, np.dtype[np.void]]"


def records_of(raw: bytes) -> Records:
    return np.frombuffer(raw, dtype=RECORD)
