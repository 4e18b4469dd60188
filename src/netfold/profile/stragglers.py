"""Find the ranks that begin operations last, and the time that other ranks wait for them.

In a synchronising operation (`matching.synchronising_operations`) all ranks wait for the last to begin. Starts are
compared on the first rank's clock. A difference within the error of the two clocks counts as 0 and names no rank. The
last rank is charged with the whole wait of each other rank, from that rank's own start, even if the last but one would
have caused a part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from netfold.profile.clock_sync import ClockSync
from netfold.profile.columns import Columns, Floats
from netfold.profile.findings import Straggler
from netfold.profile.matching import Matched, synchronising_operations
from netfold.profile.run import Run


@dataclass(frozen=True)
class WaitTimes:
    """The waits of all ranks, by trace."""

    ranks: list[Straggler]
    skew_s: list[Floats]  # [n], each record's wait for the last rank to begin; NaN if unknown


def find_stragglers(run: Run, columns: Sequence[Columns], groups: Sequence[Matched], clocks: ClockSync) -> WaitTimes:
    """Find the stragglers. Cost: P for each matched operation."""
    size = len(run.traces)
    operations, last = np.zeros(size, np.int64), np.zeros(size, np.int64)
    waited_for, waited = np.zeros(size), np.zeros(size)
    skew = [np.full(len(trace.operations), np.nan) for trace in run.traces]
    for group in groups:
        matched = synchronising_operations(run, list(columns), group)
        started = matched.field(run, "started_ns")
        aligned = np.stack([clocks.align(m, started[:, at]) for at, m in enumerate(matched.members)], axis=1)
        latest = aligned.argmax(axis=1)
        wait = (aligned.max(axis=1, keepdims=True) - aligned).astype(np.float64)
        error = np.zeros(wait.shape)
        for one, member in enumerate(matched.members):
            behind = latest == one
            for at, other in enumerate(matched.members):
                if at != one:
                    error[behind, at] = clocks.errors_at(aligned[behind, one], member, other)
        others = np.arange(len(matched.members)) != latest[:, None]
        known = np.isfinite(error).all(axis=1)
        certain = wait > error
        wait = np.where(certain, wait, 0) / 1e9
        named = known & (certain | ~others).all(axis=1)
        for at, member in enumerate(matched.members):
            operations[member] += known.sum()
            was_last = named & (latest == at)
            last[member] += was_last.sum()
            waited_for[member] += wait[was_last].sum() / max(1, len(matched.members) - 1)
            waited[member] += wait[known, at].sum()
            skew[member][matched.places[known, at]] = wait[known, at]
    return WaitTimes(
        [
            Straggler(
                rank=trace.metadata.rank,
                host=trace.metadata.host,
                operations=int(operations[at]),
                last=int(last[at]),
                waited_for_s=float(waited_for[at]),
                waited_s=float(waited[at]),
            )
            for at, trace in enumerate(run.traces)
        ],
        skew,
    )
