"""Who begins last, and what the others wait for.

In a meeting (`matching.meetings`) all wait for the last to begin. Starts are compared on the first rank's clock; a
difference that is no larger than what the two clocks may be apart says nothing: it names nobody and counts as none.
What counts for the last rank is what each of the others waited, from its own start on: all of it, also where the last
but one would have kept them for a part of it.
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
    """ranks: one a trace; skew_s: [n] a trace, each record's wait for the last to begin, NaN where it is not known."""

    ranks: list[Straggler]
    skew_s: list[Floats]


def find_stragglers(run: Run, columns: Sequence[Columns], groups: Sequence[Matched], clocks: ClockSync) -> WaitTimes:
    """Cost: P a matched operation."""
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
            mine = named & (latest == at)
            last[member] += mine.sum()
            waited_for[member] += wait[mine].sum() / max(1, len(matched.members) - 1)
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
