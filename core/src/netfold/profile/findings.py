"""The results of a profile as plain values. The page, the terminal, JSON and CSV show these and compute nothing.

Times are in seconds, sizes in bytes, bandwidths in bytes per second. "A rank's" means the mean over ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from netfold.units import first_few

KB, MB = 1 << 10, 1 << 20
# Upper bounds of hvprof's buckets for Horovod's messages (Awan et al., HotI 2019). Larger sizes have another bucket.
BUCKETS = (128 * KB, 16 * MB, 32 * MB, 64 * MB)


def bucket_ends(bucket: int, buckets: Sequence[int]) -> tuple[int, int | None]:
    """The bytes above which, and up to which (None: no end), the bucket of that number goes."""
    return buckets[bucket - 1] if bucket else 0, buckets[bucket] if bucket < len(buckets) else None


@dataclass(frozen=True)
class Row:
    """One operation in one bucket of sizes: above `above_bytes` and up to `to_bytes` (None: no upper bound).

    With `submitted_only`, all times, bandwidths and shares are None. Otherwise only exposed_s and skew_s may be None.
    Fields that the backend does not report are None: wire_bytes, retransmissions, registration_*.
    """

    operation: str
    above_bytes: int
    to_bytes: int | None
    count: float  # a rank's
    bytes: float  # a rank's
    total_s: float | None = None  # a rank's
    mean_s: float | None = None  # over all ranks' operations, as p50_s and p99_s
    p50_s: float | None = None
    p99_s: float | None = None
    algbw: float | None = None  # bytes over total time
    busbw: float | None = None  # algbw times nccl-tests' factor
    share: float | None = None  # of all rows' total_s
    exposed_s: float | None = None  # a rank's
    queue_s: float | None = None  # a rank's total between submission and start
    skew_s: float | None = None  # a rank's total between its own start and the last rank's
    algorithms: Mapping[str, int] = field(default_factory=dict)  # count of each, over all ranks
    wires: Mapping[str, int] = field(default_factory=dict)  # the same, of operations with bytes
    wire_bytes: float | None = None  # a rank's, as the three below
    retransmissions: float | None = None
    registration_hits: float | None = None
    registration_misses: float | None = None
    errors: int = 0
    submitted_only: bool = False  # only the submission to a device was recorded

    @property
    def name(self) -> str:
        """The operation's name, marked if only its submission was recorded."""
        return f"{self.operation} (submitted)" if self.submitted_only else self.operation


@dataclass(frozen=True)
class Overlap:
    """Communication that was hidden by computing: a rank's values, of the whole profile or of one step.

    Submissions to a device do not count as communication. With submissions only, communication_s and exposed_s are
    None.
    """

    wall_s: float  # from beginning to end
    communication_s: float | None  # time with at least one operation under way
    exposed_s: float | None  # part of it without computing on the training thread; None if the thread was not watched
    overlap_ratio: float | None  # 1 - exposed_s / communication_s; None without communication


@dataclass(frozen=True)
class StepTimes:
    """Training steps: their count, and the times of one step as (median, p5, p95).

    communication_s and exposed_s are None as in `Overlap`.
    """

    count: int
    wall_s: tuple[float, float, float]
    communication_s: tuple[float, float, float] | None
    exposed_s: tuple[float, float, float] | None


@dataclass(frozen=True)
class Straggler:
    """One rank's delays, over the operations that no rank can finish before all have begun."""

    rank: int
    host: str
    operations: int
    last: int  # operations that this rank was the last to begin
    waited_for_s: float  # time that the other ranks waited for this one there, the mean over them
    waited_s: float  # time that this rank waited for others
    last_of_host: int = 0  # operations that it was the last of its host's ranks to begin; one clock, so no error
    host_waited_s: float = 0.0  # time that its host's other ranks waited for it there, the mean over them
    host_operations: int = 0  # operations that were compared among its host's ranks

    @property
    def is_known_by_host(self) -> bool:
        """Whether its host's ranks show more of its delays than all ranks, whose clocks are not known as exactly."""
        return self.host_waited_s > self.waited_for_s

    @property
    def delay_s(self) -> float:
        """The longer one of waited_for_s and host_waited_s."""
        return max(self.waited_for_s, self.host_waited_s)

    @property
    def delays(self) -> int:
        """The operations of delay_s."""
        return self.last_of_host if self.is_known_by_host else self.last

    @property
    def compared(self) -> int:
        """The operations of which `delays` is a part."""
        return self.host_operations if self.is_known_by_host else self.operations

    @property
    def waiting_ranks(self) -> str:
        """The ranks whose waits delay_s counts."""
        return "other ranks of its host" if self.is_known_by_host else "other ranks"


@dataclass(frozen=True)
class ClockOffset:
    """The offset from a rank's clock to the first rank's clock."""

    rank: int
    offset_ns: int  # add this to the rank's times; with knots, the offset in the middle of the run
    bound_ns: int | None  # largest error; None: unbounded
    # For clocks that drift: (time of the rank, offset there), ascending, interpolated linearly. `align` uses these.
    knots: tuple[tuple[int, int], ...] = ()

    def align(self, times_ns: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Convert the rank's times, [n], to the first rank's clock."""
        if not self.knots:
            return times_ns + self.offset_ns
        at, offsets = np.array(self.knots).T
        moves: np.ndarray[Any, np.dtype[np.int64]] = np.round(np.interp(times_ns, at, offsets)).astype(np.int64)
        return times_ns + moves


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 2`, `ranks 1, 2 and 8 more`."""
    shown = first_few([str(rank) for rank in ranks], 8)
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def submissions_text(submissions: Mapping[str, int]) -> str:
    """Say what is unknown of `Findings.submissions`, and how to measure it; empty without submissions."""
    if not submissions:
        return ""
    return (
        f"{sum(submissions.values()):,} operations ({', '.join(sorted(submissions))}) were recorded only as the host "
        "submitted them: they have counts and bytes and no times, since they ran on a device later. For their times "
        "let NCCL record them (netfold nccl-env --profile), put events of the device around them "
        "(torch.cuda.Event(enable_timing=True)), or run torch.profiler with "
        "ProfilerActivity.CUDA"
    )


@dataclass(frozen=True)
class Advice:
    """One sentence of advice, with numbers."""

    text: str
    prediction: bool = False  # by the cost model, not measured


@dataclass(frozen=True)
class Findings:
    """All results of a profile."""

    title: str  # the command
    size: int  # ranks of the job
    ranks: list[int]  # ranks with records
    sources: list[str]
    backends: list[str]
    rows: list[Row]
    overall: Overlap
    steps: StepTimes | None
    stragglers: list[Straggler]
    clocks: list[ClockOffset]
    advice: list[Advice]
    coverage_gaps: list[str]
    lost: int  # operations that all ranks together dropped
    versions: Mapping[str, str] = field(default_factory=dict)
    hosts: list[str] = field(default_factory=list)
    # By rank, as in `RankMetadata`; of ranks on a fabric.
    registrations: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    # By backend: operations of all ranks of which only the submission was recorded.
    submissions: Mapping[str, int] = field(default_factory=dict)

    def limitations(self) -> list[str]:
        """Gaps in the records that make the numbers less than they seem, in clauses without a period."""
        found = [submissions_text(self.submissions)] if self.submissions else []
        absent = sorted(set(range(self.size)) - set(self.ranks))
        if absent:
            named = ranks_text(absent)
            found.append(
                f"{len(absent)} of {self.size} ranks left no records, {named}: means are over {len(self.ranks)}"
            )
        if self.lost:
            found.append(
                f"{self.lost:,} operations were lost: they came faster than they could be written, and are in no "
                "number here"
            )
        return found
