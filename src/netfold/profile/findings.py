"""What a profile says, as plain values: the page, the terminal, JSON and CSV show these and compute nothing.

Times are seconds, sizes bytes, bandwidths bytes a second. "A rank's" means the mean over ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

KB, MB = 1 << 10, 1 << 20
# hvprof's, for Horovod's messages (Awan et al., HotI 2019): upper ends; what is larger has a bucket of its own.
BUCKETS = (128 * KB, 16 * MB, 32 * MB, 64 * MB)


@dataclass(frozen=True)
class Row:
    """One operation in one bucket of sizes: above `above_bytes` and up to `to_bytes` (None: no end).

    submitted_only: of these operations only the submission to a device was recorded; then no time, bandwidth or share
    is known (None). Otherwise only exposed_s and skew_s may be None.

    count, total_s, bytes, exposed_s, wire_bytes, retransmissions, registration_*: a rank's; mean_s, p50_s, p99_s: of
    all ranks' operations; queue_s: a rank's total between submission and start; skew_s: a rank's total between its own
    start and the last rank's; algbw and busbw: bytes over total time, busbw times nccl-tests' factor; share: of all
    rows' total_s. algorithms: how often each was taken, over all ranks; wires: the same, of operations with bytes.
    wire_bytes, retransmissions, registration_*: None where the backend does not say.
    """

    operation: str
    above_bytes: int
    to_bytes: int | None
    count: float
    bytes: float
    total_s: float | None
    mean_s: float | None
    p50_s: float | None
    p99_s: float | None
    algbw: float | None
    busbw: float | None
    share: float | None
    exposed_s: float | None
    queue_s: float | None
    skew_s: float | None
    algorithms: Mapping[str, int] = field(default_factory=dict)
    wires: Mapping[str, int] = field(default_factory=dict)
    wire_bytes: float | None = None
    retransmissions: float | None = None
    registration_hits: float | None = None
    registration_misses: float | None = None
    errors: int = 0
    submitted_only: bool = False

    @property
    def name(self) -> str:
        """The operation, marked where only its submission was recorded."""
        return f"{self.operation} (submitted)" if self.submitted_only else self.operation


@dataclass(frozen=True)
class Overlap:
    """How much of communication computing hid. All a rank's, of the whole profile or of one step.

    wall_s: from begin to end; communication_s: in which at least one operation was under way; exposed_s: of these, in
    which the training thread did not compute. overlap_ratio = 1 - exposed_s / communication_s, None without any.
    exposed_s is None where nobody watched the training thread. Submissions to a device are no communication here: where
    there is nothing else, communication_s and exposed_s are None.
    """

    wall_s: float
    communication_s: float | None
    exposed_s: float | None
    overlap_ratio: float | None


@dataclass(frozen=True)
class StepTimes:
    """Steps of training: count, and the wall time, communication and exposed time of one (median, p5, p95).

    communication_s, exposed_s: None where `Overlap` has None.
    """

    count: int
    wall_s: tuple[float, float, float]
    communication_s: tuple[float, float, float] | None
    exposed_s: tuple[float, float, float] | None


@dataclass(frozen=True)
class Straggler:
    """One rank, in the operations that no rank can finish before all have begun.

    last: how many it was the last to begin; waited_for_s: what the others spent waiting for it there, the mean over
    them; waited_s: what it spent waiting for others.
    """

    rank: int
    host: str
    operations: int
    last: int
    waited_for_s: float
    waited_s: float


@dataclass(frozen=True)
class ClockOffset:
    """Add offset_ns to a rank's times to have the first rank's. bound_ns: how far that may be off, None: unbounded.

    knots: where the clocks drift, (a time of the rank's own, what to add there), ascending; between two, a line.
    offset_ns is then that of the middle. `align` goes by them.
    """

    rank: int
    offset_ns: int
    bound_ns: int | None
    knots: tuple[tuple[int, int], ...] = ()

    def align(self, times_ns: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Times of the rank as the first rank's clock would have shown them, [n]."""
        if not self.knots:
            return times_ns + self.offset_ns
        at, offsets = np.array(self.knots).T
        aligned: np.ndarray[Any, np.dtype[np.int64]] = times_ns + np.round(np.interp(times_ns, at, offsets)).astype(
            np.int64
        )
        return aligned


def submissions_text(submissions: Mapping[str, int]) -> str:
    """What is not known of `submissions` (Findings), and how to learn it, in a sentence; empty where there is none."""
    if not submissions:
        return ""
    return (
        f"{sum(submissions.values()):,} operations ({', '.join(sorted(submissions))}) were recorded only as the host "
        "submitted them: they have counts and bytes and no times, since they ran on a device later. For their times "
        "put events of the device around them (torch.cuda.Event(enable_timing=True)), or run torch.profiler with "
        "ProfilerActivity.CUDA"
    )


@dataclass(frozen=True)
class Advice:
    """One sentence with numbers. prediction: it says what would be, by the cost model, not what was measured."""

    text: str
    prediction: bool


@dataclass(frozen=True)
class Findings:
    """All of it.

    ranks: who left records; size: how many the job had; title: the command; lost: operations that all ranks dropped;
    registrations: by rank, as `About` has them, of those on a fabric; submissions: how many operations of all ranks
    were recorded as submissions alone, by backend.
    """

    title: str
    size: int
    ranks: list[int]
    sources: list[str]
    backends: list[str]
    rows: list[Row]
    overall: Overlap
    steps: StepTimes | None
    stragglers: list[Straggler]
    clocks: list[ClockOffset]
    advice: list[Advice]
    coverage_gaps: list[str]
    lost: int
    versions: Mapping[str, str] = field(default_factory=dict)
    hosts: list[str] = field(default_factory=list)
    registrations: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    submissions: Mapping[str, int] = field(default_factory=dict)
