"""Sample the processes of a running job many times a second, from outside.

For each rank of each group, over an interval:

rates: differences of the status segment's counters, exact to an operation.

under way: the share of the interval with at least one operation submitted and not done; exact, from the segment.

exposed: the share of the time under way in which the training thread did not compute. This is an **estimate by
sampling**. It takes the process's main thread as the training thread. Between two samples, dt apart:
- The segment holds the time that calling threads were inside netfold, waiting for an operation or running it. This is
  exact; CPU time there is communication. All of it counts as exposed.
- The scheduler holds the time that the main thread ran or was runnable (/proc/PID/task/PID/schedstat). The main thread
  slept for the rest of dt. Sleep beyond its time inside netfold is sleep elsewhere: in a data loader, on a device, in a
  lock. Sleep elsewhere counts by the share of the time outside netfold with an operation under way, as if the two were
  independent between two samples.
Consequences: threads that compute while the main thread sleeps count as not computing. A thread that spins on a device
counts as computing. Of a training thread that is not the main thread, only the time inside netfold counts. The
scheduler updates its figures at its ticks, so excess sleep of one sample is subtracted from the next.

slowest: if the switch reports the last rank of each operation, the rank that was last most often; exact. The remaining
operations belong to ranks not seen here. Without these reports: the rank that in most samples had not called an
operation in which others already waited. Such a rank is read a second time after the others, so the order of reading
processes causes no error. A rank of another host is named if others wait for it and no rank here is behind.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from netfold.diagnostics.status_segment import Rank, StatusSegment, find_segments

# Samples a second, on average. The interval is short compared to a training step.
SAMPLE_HZ = 25
# The interval of searches for new processes. A search reads all descriptors of all processes of the machine.
_FIND_S = 5.0
# The most excess sleep that is subtracted later: the longest time that a thread is runnable between updates.
_MAX_OWED_NS = 50_000_000


@dataclass(frozen=True)
class RankRates:
    """One rank over one interval."""

    rank: Rank  # at the end of the interval
    has_ended: bool  # the process ended earlier
    operations_per_s: float
    tensor_bytes_per_s: float
    wire_bytes_per_s: float
    retransmissions: int
    under_way_share: float  # of the interval
    exposed_share: float | None  # of the time under way; None: nothing was, or this kernel has no schedstat


@dataclass(frozen=True)
class Slowest:
    """The rank that was last most often."""

    ranks: tuple[int, ...]  # the rank; or all ranks not seen here, if it is an unknown one of these
    count: int  # times that the rank was last
    of: int  # times that any rank was last
    reported_by_switch: bool


@dataclass(frozen=True)
class Snapshot:
    """One group over one interval."""

    job: str
    size: int
    interval_s: float
    lines: tuple[RankRates, ...]
    absent: tuple[int, ...]  # ranks without a process on this machine that this user may inspect
    slowest: Slowest | None


class Sampler:
    """Samples the groups of this machine, or the groups of process `pid`. Close it after use."""

    def __init__(self, pid: int | None = None) -> None:
        self._pid = pid
        self._processes: dict[int, _Process] = {}
        self._find_at = 0.0

    def snapshot(self, interval_s: float) -> list[Snapshot]:
        """Sample for `interval_s` seconds. Returns one snapshot for each group."""
        self._find()
        began_ns = time.monotonic_ns()
        groups: dict[str, _Group] = {}
        while True:
            look_ns = time.monotonic_ns()
            self._look(groups)
            left_s = interval_s - (look_ns - began_ns) / 1e9
            if left_s <= 0:
                break
            # Random distances: at equal ones, a job with steps of that length is always sampled at the same point.
            time.sleep(min(random.uniform(0.5, 1.5) / SAMPLE_HZ, left_s))
        return [groups[job].snapshot() for job in sorted(groups)]

    def close(self) -> None:
        for process in self._processes.values():
            process.close()
        self._processes.clear()

    def _find(self) -> None:
        """Remove ended processes. Search for new ones every `_FIND_S` seconds, and when none is left."""
        for pid in [pid for pid, process in self._processes.items() if process.has_ended]:
            self._processes.pop(pid).close()
        if self._processes and time.monotonic() < self._find_at:
            return
        self._find_at = time.monotonic() + _FIND_S
        for segment in find_segments():
            if segment.pid in self._processes:
                segment.close()
            else:
                self._processes[segment.pid] = _Process(segment)

    def _look(self, groups: dict[str, _Group]) -> None:
        by_job: dict[str, list[tuple[_Process, Rank]]] = {}
        for process in self._processes.values():
            for rank in process.look():
                by_job.setdefault(rank.job, []).append((process, rank))
        for job, members in by_job.items():
            if self._pid is None or job in groups or any(process.pid == self._pid for process, _ in members):
                groups.setdefault(job, _Group(job)).look(members)


class _Process:
    """One process: its status segment, and the time that its main thread slept."""

    def __init__(self, segment: StatusSegment) -> None:
        self.pid = segment.pid
        self.has_ended = False
        self.slept_ns: int | None = None  # since the previous sample; None: first sample, or unknown
        self._segment = segment
        self._schedstat: int | None = None
        with contextlib.suppress(OSError):  # a kernel without schedstat, or the process has just ended
            self._schedstat = os.open(f"/proc/{self.pid}/task/{self.pid}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self._before: tuple[int, int] | None = None

    def look(self) -> list[Rank]:
        """Read the process's ranks; empty if it has ended."""
        if self.has_ended:
            return []
        try:
            ranks = self._segment.ranks()
            self.slept_ns = self._slept()
        except OSError:
            self.has_ended = True
            return []
        self.has_ended = any(rank.process_state in "ZX" for rank in ranks)
        return [] if self.has_ended else ranks

    def again(self, job: str, number: int) -> Rank | None:
        """Read one rank again. A process may have several ranks of one job, in threads."""
        with contextlib.suppress(OSError):
            return next((rank for rank in self._segment.ranks() if (rank.job, rank.rank) == (job, number)), None)
        return None

    def close(self) -> None:
        self._segment.close()
        if self._schedstat is not None:
            os.close(self._schedstat)

    def _slept(self) -> int | None:
        if self._schedstat is None:
            return None
        ran_ns, runnable_ns, _ = (int(field) for field in os.pread(self._schedstat, 128, 0).split())
        now = (time.monotonic_ns(), ran_ns + runnable_ns)
        before, self._before = self._before, now
        return None if before is None else (now[0] - before[0]) - (now[1] - before[1])


class _Member:
    """One rank over an interval, accumulated from samples."""

    def __init__(self, rank: Rank, seen_at: int) -> None:
        self.first = self.last = rank
        self.seen_at = seen_at  # number of the group's sample
        self.exposed_ns: float | None = 0.0
        self._owed_ns = 0

    def look(self, rank: Rank, slept_ns: int | None, seen_at: int) -> None:
        before, now = self.last.counters, rank.counters
        self.last, self.seen_at = rank, seen_at
        if slept_ns is None or self.exposed_ns is None:
            self.exposed_ns = None
            return
        self.exposed_ns += self.exposed(
            now.read_ns - before.read_ns,
            now.under_way_ns - before.under_way_ns,
            now.inside_ns - before.inside_ns,
            slept_ns,
        )

    def since(self, counter: str) -> int:
        return int(getattr(self.last.counters, counter)) - int(getattr(self.first.counters, counter))

    def exposed(self, dt_ns: int, under_way_ns: int, inside_ns: int, slept_ns: int) -> float:
        """The exposed time between two samples, as defined at the top of this file."""
        under_way_ns = min(max(under_way_ns, 0), dt_ns)
        inside_ns = min(max(inside_ns, 0), under_way_ns)
        # A negative sleep: the previous sample showed too much.
        slept_ns += self._owed_ns
        self._owed_ns = min(0, max(slept_ns, -_MAX_OWED_NS))
        outside_ns = dt_ns - inside_ns
        if outside_ns == 0:
            return inside_ns
        elsewhere_ns = min(max(slept_ns - inside_ns, 0), outside_ns)
        return inside_ns + elsewhere_ns * (under_way_ns - inside_ns) / outside_ns


class _Group:
    """One group over an interval, accumulated from samples."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._members: dict[int, _Member] = {}
        self._last: Counter[int] = Counter()  # samples in which the rank was last
        self._looks = 0

    def look(self, members: Sequence[tuple[_Process, Rank]]) -> None:
        self._looks += 1
        for process, rank in members:
            known = self._members.get(rank.rank)
            if known is None or known.last.pid != rank.pid or known.last.joined_ns != rank.joined_ns:
                self._members[rank.rank] = _Member(rank, self._looks)
            else:
                known.look(rank, process.slept_ns, self._looks)
        self._count_stragglers(members)

    def _count_stragglers(self, members: Sequence[tuple[_Process, Rank]]) -> None:
        by_rank = {rank.rank: process for process, rank in members}
        front = max(rank.sequence for _, rank in members)
        for number in ranks_behind([rank for _, rank in members]):
            if number in by_rank:
                again = by_rank[number].again(self._job, number)
                if again is None or not _has_not_called(again, front):
                    continue
            self._last[number] += 1

    def snapshot(self) -> Snapshot:
        lines = tuple(self._line(self._members[number]) for number in sorted(self._members))
        size = lines[0].rank.size
        absent = tuple(sorted(set(range(size)) - set(self._members)))
        began_ns = min(member.first.counters.read_ns for member in self._members.values())
        ended_ns = max(member.last.counters.read_ns for member in self._members.values())
        return Snapshot(
            job=self._job,
            size=size,
            interval_s=(ended_ns - began_ns) / 1e9,
            lines=lines,
            absent=absent,
            slowest=self._slowest(absent),
        )

    def _slowest(self, absent: tuple[int, ...]) -> Slowest | None:
        judged = max(member.since("judged") for member in self._members.values())
        if judged == 0 and not self._last:
            return None
        if judged == 0:
            rank, count = self._last.most_common(1)[0]
            return Slowest((rank,), count, self._last.total(), reported_by_switch=False)
        by_rank: dict[tuple[int, ...], int] = {
            (number,): member.since("last") for number, member in self._members.items()
        }
        if absent:
            by_rank[absent] = max(0, judged - sum(by_rank.values()))
        ranks = max(by_rank, key=lambda ranks: by_rank[ranks])
        return Slowest(ranks, by_rank[ranks], judged, reported_by_switch=True)

    def _line(self, member: _Member) -> RankRates:
        first, last = member.first.counters, member.last.counters
        seconds = (last.read_ns - first.read_ns) / 1e9
        under_way_ns = member.since("under_way_ns")
        per_s = 1 / seconds if seconds > 0 else 0.0
        exposed = member.exposed_ns
        return RankRates(
            rank=member.last,
            has_ended=member.seen_at < self._looks,
            operations_per_s=member.since("operations") * per_s,
            tensor_bytes_per_s=member.since("tensor_bytes") * per_s,
            wire_bytes_per_s=member.since("wire_bytes") * per_s,
            retransmissions=member.since("retransmissions"),
            under_way_share=min(1.0, under_way_ns / 1e9 * per_s),
            exposed_share=None if exposed is None or under_way_ns <= 0 else min(1.0, exposed / under_way_ns),
        )


def ranks_behind(ranks: Sequence[Rank]) -> list[int]:
    """The ranks of one group that have not called an operation that others wait in.

    If no rank here is behind: the ranks of other hosts that ranks here wait for.
    """
    front = max(rank.sequence for rank in ranks)
    if front == 0:
        return []
    here = [rank.rank for rank in ranks if _has_not_called(rank, front)]
    if here:
        return here
    elsewhere = {peer for rank in ranks for peer in rank.awaited} - {rank.rank for rank in ranks}
    return sorted(elsewhere)


def _has_not_called(rank: Rank, front: int) -> bool:
    if rank.failure:
        return False
    if rank.sequence:
        return rank.sequence < front
    # With an operation under way, the rank has called it and the segment does not show its sequence number yet.
    return not rank.counters.is_under_way and rank.done_sequence < front
