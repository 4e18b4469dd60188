"""Find the ranks that begin operations last, and the time that other ranks wait for them.

In a synchronising operation (`matching.synchronising_operations`) all ranks wait for the last to begin. Starts are
compared on the first rank's clock. A difference within the error of the two clocks counts as 0 and names no rank. The
last rank is charged with the whole wait of each other rank, from that rank's own start, even if the last but one would
have caused a part of it.

Ranks of one host share a clock, so their starts are also compared among themselves. This names a rank that is late by
less than the clocks of two hosts can show: it is the last of its host's ranks. Whether another host had a rank that was
later still remains unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from netfold.profile.clock_sync import ClockSync
from netfold.profile.columns import Bools, Columns, Floats, Integers
from netfold.profile.findings import Straggler
from netfold.profile.matching import Matched, synchronising_operations
from netfold.profile.run import Run


@dataclass(frozen=True)
class WaitTimes:
    """The waits of all ranks, by trace."""

    ranks: list[Straggler]
    skew_s: list[Floats]  # [n], each record's wait for the last rank to begin; NaN if unknown
    operations: int  # all that were compared
    unnamed: int  # of these, in which the error of the clocks hid the last rank
    error_s: float  # the median of that error, over `unnamed`; 0 without


def find_stragglers(run: Run, columns: Sequence[Columns], groups: Sequence[Matched], clocks: ClockSync) -> WaitTimes:
    """Find the stragglers. Cost: P for each matched operation."""
    size = len(run.traces)
    hosts = np.array([trace.metadata.host for trace in run.traces])
    operations = np.zeros(size, np.int64)
    of_all, of_host = _Delays.of(size), _Delays.of(size)
    waited = np.zeros(size)
    host_operations = np.zeros(size, np.int64)
    skew = [np.full(len(trace.operations), np.nan) for trace in run.traces]
    compared, hidden_ns = 0, []
    for group in groups:
        matched = synchronising_operations(run, list(columns), group)
        members = np.array(matched.members)
        started = matched.field(run, "started_ns")
        aligned = np.stack([clocks.align(m, started[:, at]) for at, m in enumerate(members)], axis=1)
        latest = aligned.argmax(axis=1)
        error = np.zeros(aligned.shape)
        for one, member in enumerate(members):
            behind = latest == one
            for at, other in enumerate(members):
                if at != one:
                    error[behind, at] = clocks.errors_at(aligned[behind, one], member, other)
        known: Bools = np.logical_and.reduce(np.isfinite(error), axis=1)
        wait, named = of_all.add(members, aligned, error, known)
        for at, member in enumerate(members):
            operations[member] += known.sum()
            waited[member] += wait[known, at].sum()
            skew[member][matched.places[known, at]] = wait[known, at]
        compared += int(known.sum())
        gap = aligned.max(axis=1, keepdims=True) - aligned
        hidden = known & ~named & ((gap <= error) & (error > 0)).any(axis=1)
        hidden_ns.append(error.max(axis=1)[hidden])
        for host in np.unique(hosts[members]):
            here = hosts[members] == host
            if here.sum() > 1:
                of_host.add(members[here], started[:, here], np.zeros(1), np.ones(len(started), bool))
                host_operations[members[here]] += len(started)
    errors = np.concatenate([*hidden_ns, np.zeros(0)]) / 1e9
    return WaitTimes(
        [
            Straggler(
                rank=trace.metadata.rank,
                host=trace.metadata.host,
                operations=int(operations[at]),
                last=int(of_all.last[at]),
                waited_for_s=float(of_all.waited_for_s[at]),
                waited_s=float(waited[at]),
                last_of_host=int(of_host.last[at]),
                host_waited_s=float(of_host.waited_for_s[at]),
                host_operations=int(host_operations[at]),
            )
            for at, trace in enumerate(run.traces)
        ],
        skew,
        compared,
        len(errors),
        float(np.median(errors)) if len(errors) else 0.0,
    )


@dataclass(frozen=True)
class _Delays:
    """By trace: how often a rank began last, and the mean time that the ranks compared with it waited."""

    last: Integers
    waited_for_s: Floats

    @classmethod
    def of(cls, size: int) -> _Delays:
        return cls(np.zeros(size, np.int64), np.zeros(size))

    def add(self, members: Integers, started_ns: Integers, error_ns: Floats, known: Bools) -> tuple[Floats, Bools]:
        """Add operations of which started_ns has [n, P] starts on one clock, with errors against the last start.

        Returns each rank's wait in seconds, [n, P], and in which operations one rank is named as the last.
        """
        latest = started_ns.argmax(axis=1)
        wait = (started_ns.max(axis=1, keepdims=True) - started_ns).astype(np.float64)
        certain = wait > error_ns
        wait = np.where(certain, wait, 0) / 1e9
        others = np.arange(len(members)) != latest[:, None]
        named: Bools = known & (certain | ~others).all(axis=1)
        for at, member in enumerate(members):
            was_last = named & (latest == at)
            self.last[member] += was_last.sum()
            self.waited_for_s[member] += wait[was_last].sum() / max(1, len(members) - 1)
        return wait, named
