"""Estimate the share of exposed communication while a job runs. An estimate costs microseconds.

A recording knows to within 4 ms when the training thread computed. Without a recording, two sums are known of the time
since the last estimate: how long operations were under way (from the groups' event records), and how long the thread
was on a core or in the queue for a core (from the kernel). The estimate is the largest exposed time that both sums
allow. An operation that ran on the thread itself is exposed, however much the thread computed. So the estimate is too
high if the thread slept for other reasons while operations ran.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np

from netfold.profile.record import RECORD, Records, records_of
from netfold.profile.recording import members


class LiveOverlap:
    """The estimate for the thread that creates this object."""

    def __init__(self) -> None:
        self._schedstat = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._read_up_to = {member.number: member.read(0)[0] for member in members()}
        self._at_ns, self._busy_ns = time.perf_counter_ns(), self._busy()
        self._waited_s = 0.0
        self._share: float | None = None

    def exposed_share(self, waited_s: float = 0.0, *, every_s: float = 0.0) -> float | None:
        """Return the exposed share of the time since the last estimate, 0 to 1.

        waited_s: the time since the last call in which the thread waited for other things than communication.
        every_s: the shortest time of an estimate; an earlier call returns the last estimate again.
        None before the first estimate, if there is no netfold group, or if the kernel does not report a thread's time.
        Groups keep their newest 8192 operations; older ones do not count.
        """
        self._waited_s += waited_s
        if time.perf_counter_ns() - self._at_ns >= 1e9 * every_s:
            self._share, self._waited_s = self._estimate(self._waited_s), 0.0
        return self._share

    def _estimate(self, waited_s: float) -> float | None:
        at_ns, busy_ns = time.perf_counter_ns(), self._busy()
        records = self._records()
        passed_ns, busy = at_ns - self._at_ns, None
        if busy_ns is not None and self._busy_ns is not None:
            busy = busy_ns - self._busy_ns
        since_ns, self._at_ns, self._busy_ns = self._at_ns, at_ns, busy_ns
        if records is None or busy is None:
            return None
        idle_ns = max(0.0, passed_ns - busy - 1e9 * waited_s)
        under_way_ns = _covered_ns(records, since_ns)
        inlined_ns = _covered_ns(records[records["inlined"] != 0], since_ns)
        return min(1.0, min(under_way_ns, idle_ns + inlined_ns) / passed_ns)

    def _records(self) -> Records | None:
        """The records of all groups since the last call; None if there is no group."""
        groups = members()
        if not groups:
            return None
        found = [np.empty(0, RECORD)]
        for member in groups:
            total, raw = member.read(self._read_up_to.get(member.number, 0))
            self._read_up_to[member.number] = total
            found.append(records_of(raw))
        return np.concatenate(found)

    def _busy(self) -> int | None:
        """Nanoseconds on a core and in the queue for a core, since the start of the thread."""
        try:
            ran, queued, _ = self._schedstat.read_text().split()
        except (OSError, ValueError):
            return None
        return int(ran) + int(queued)


def _covered_ns(records: Records, since_ns: int) -> float:
    """The time with at least one operation under way."""
    if not len(records):
        return 0.0
    order = np.argsort(records["started_ns"])
    started = np.maximum(records["started_ns"][order], since_ns)
    finished = np.maximum(records["finished_ns"][order], since_ns)
    # The latest end of all earlier operations: only time after this end is new.
    reached = np.maximum.accumulate(np.concatenate([[since_ns], finished[:-1]]))
    return float(np.maximum(finished - np.maximum(started, reached), 0).sum())
