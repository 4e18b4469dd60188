"""A running job, seen from outside: looks at its processes many times a second, and what follows from them.

Of an interval, for each rank of each group:

rates: differences of the page's counters, exact to an operation.

under way: the share of the interval in which at least one operation was submitted and not done; exact, from the page.

exposed: of that time, the share in which the training thread did not compute. It is an **estimate by sampling**. The
training thread is taken to be the process's main thread. Between two looks, dt apart, the page says how long the
caller's threads were inside netfold, waiting for an operation or running it themselves (exact; CPU that they use
there is communication). The scheduler says how long the main thread ran or stood in line to run
(/proc/PID/task/PID/schedstat); the rest of dt it slept. What it slept beyond its time inside netfold it slept
elsewhere: in a data loader, on a device, in a lock. Inside counts as exposed as it is, sleep elsewhere by the part of
the time outside netfold in which something was under way, as if the two had nothing to do with each other between two
looks. So: threads that compute while the main thread sleeps count as not computing, a thread that spins on a device
as computing, and a training thread that is not the main thread is seen only by its time inside netfold. The
scheduler's figures are brought up to date at its ticks, which is why sleep that one look shows too much is taken from
the next.

slowest: where the switch says who came last to each operation, the rank that it named most often, exact; what is left
over are ranks that are not seen here. Else the rank that at most looks had not called what others already waited in.
That is looked at twice, the second time after the others were seen there, so it is not an artefact of reading one
process after the other. A rank of another host is named when others wait for it and nobody here is behind.
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

# Looks a second, on average: short against a step of training.
SAMPLE_HZ = 25
# How often to look for new processes, which goes through all descriptors of all processes of the machine.
_FIND_S = 5.0
# How much sleep seen too much is kept to be taken from later sleep: as long as a thread may stand in line unseen.
_MAX_OWED_NS = 50_000_000


@dataclass(frozen=True)
class RankRates:
    """One rank over one interval. `rank` is as of its end; has_ended: its process left before that."""

    rank: Rank
    has_ended: bool
    operations_per_s: float
    tensor_bytes_per_s: float
    wire_bytes_per_s: float
    retransmissions: int
    under_way_share: float  # of the interval
    exposed_share: float | None  # of the time under way; None: nothing was, or this kernel has no schedstat


@dataclass(frozen=True)
class Slowest:
    """The rank that was last most often: `count` of the `of` times that any was seen to be.

    ranks: that one, or all that are not seen, where it is one of them and it cannot be said which.
    """

    ranks: tuple[int, ...]
    count: int
    of: int
    reported_by_switch: bool


@dataclass(frozen=True)
class Snapshot:
    """One group over one interval. absent: its ranks that are no process of this machine that this user may see."""

    job: str
    size: int
    interval_s: float
    lines: tuple[RankRates, ...]
    absent: tuple[int, ...]
    slowest: Slowest | None


class Sampler:
    """Looks at the groups of this machine, or at those that process `pid` has a rank of. Close it."""

    def __init__(self, pid: int | None = None) -> None:
        self._pid = pid
        self._processes: dict[int, _Process] = {}
        self._find_at = 0.0

    def snapshot(self, interval_s: float) -> list[Snapshot]:
        """Look for `interval_s` seconds; one picture a group, none where there is no group."""
        self._find()
        began_ns = time.monotonic_ns()
        groups: dict[str, _Group] = {}
        while True:
            look_ns = time.monotonic_ns()
            self._look(groups)
            left_s = interval_s - (look_ns - began_ns) / 1e9
            if left_s <= 0:
                break
            # At equal distances, a job whose steps take as long would be seen at the same place of each.
            time.sleep(min(random.uniform(0.5, 1.5) / SAMPLE_HZ, left_s))
        return [groups[job].snapshot() for job in sorted(groups)]

    def close(self) -> None:
        for process in self._processes.values():
            process.close()
        self._processes.clear()

    def _find(self) -> None:
        """Out with processes that have ended, and at times, or where none is left, see who is new."""
        for pid in [pid for pid, process in self._processes.items() if process.has_ended]:
            self._processes.pop(pid).close()
        if self._processes and time.monotonic() < self._find_at:
            return
        self._find_at = time.monotonic() + _FIND_S
        for page in find_segments():
            if page.pid in self._processes:
                page.close()
            else:
                self._processes[page.pid] = _Process(page)

    def _look(self, groups: dict[str, _Group]) -> None:
        found: dict[str, list[tuple[_Process, Rank]]] = {}
        for process in self._processes.values():
            for rank in process.look():
                found.setdefault(rank.job, []).append((process, rank))
        for job, members in found.items():
            if self._pid is None or job in groups or any(process.pid == self._pid for process, _ in members):
                groups.setdefault(job, _Group(job)).look(members)


class _Process:
    """One process: its page, and the time that its main thread slept."""

    def __init__(self, page: StatusSegment) -> None:
        self.pid = page.pid
        self.has_ended = False
        self.slept_ns: int | None = None  # since the look before; None: first look, or not known
        self._page = page
        self._schedstat: int | None = None
        with contextlib.suppress(OSError):  # a kernel without it, or just ended: the next look says
            self._schedstat = os.open(f"/proc/{self.pid}/task/{self.pid}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self._before: tuple[int, int] | None = None

    def look(self) -> list[Rank]:
        """Its ranks now; none when it has ended."""
        if self.has_ended:
            return []
        try:
            ranks = self._page.ranks()
            self.slept_ns = self._slept()
        except OSError:
            self.has_ended = True
            return []
        self.has_ended = any(rank.process_state in "ZX" for rank in ranks)
        return [] if self.has_ended else ranks

    def again(self, job: str, number: int) -> Rank | None:
        """One of its ranks, as of now; a process may have several of one job, in threads."""
        with contextlib.suppress(OSError):
            return next((rank for rank in self._page.ranks() if (rank.job, rank.rank) == (job, number)), None)
        return None

    def close(self) -> None:
        self._page.close()
        if self._schedstat is not None:
            os.close(self._schedstat)

    def _slept(self) -> int | None:
        if self._schedstat is None:
            return None
        ran_ns, lined_up_ns, _ = (int(word) for word in os.pread(self._schedstat, 128, 0).split())
        now = (time.monotonic_ns(), ran_ns + lined_up_ns)
        before, self._before = self._before, now
        return None if before is None else (now[0] - before[0]) - (now[1] - before[1])


class _Member:
    """One rank over an interval, as looks add up."""

    def __init__(self, rank: Rank, seen_at: int) -> None:
        self.first = self.last = rank
        self.seen_at = seen_at  # the group's look
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
        """Of one look to the next, by the rule at the top."""
        under_way_ns = min(max(under_way_ns, 0), dt_ns)
        inside_ns = min(max(inside_ns, 0), under_way_ns)
        # Less than no sleep: the look before showed too much.
        slept_ns += self._owed_ns
        self._owed_ns = min(0, max(slept_ns, -_MAX_OWED_NS))
        outside_ns = dt_ns - inside_ns
        if outside_ns == 0:
            return inside_ns
        elsewhere_ns = min(max(slept_ns - inside_ns, 0), outside_ns)
        return inside_ns + elsewhere_ns * (under_way_ns - inside_ns) / outside_ns


class _Group:
    """One group over an interval, as looks add up."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._members: dict[int, _Member] = {}
        self._last: Counter[int] = Counter()  # by looks
        self._looks = 0

    def look(self, members: Sequence[tuple[_Process, Rank]]) -> None:
        self._looks += 1
        for process, rank in members:
            known = self._members.get(rank.rank)
            if known is None or known.last.pid != rank.pid or known.last.joined_ns != rank.joined_ns:
                self._members[rank.rank] = _Member(rank, self._looks)
            else:
                known.look(rank, process.slept_ns, self._looks)
        self._see_who_is_last(members)

    def _see_who_is_last(self, members: Sequence[tuple[_Process, Rank]]) -> None:
        late = ranks_behind([rank for _, rank in members])
        by_rank = {rank.rank: process for process, rank in members}
        front = max(rank.sequence for _, rank in members)
        for number in late:
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
    """The ranks of one group that have not called what others already wait in; of ranks elsewhere, those waited for."""
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
    # Something is under way that it has not shown yet: it looks for it, and has not lain down.
    return not rank.counters.is_under_way and rank.done_sequence < front
