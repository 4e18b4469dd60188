"""How much of the time is exposed communication, while a job runs: an estimate that costs microseconds a look.

A recording knows to within 4 ms when the training thread computed. Here nobody watches it: of a whole stretch it is
known how long operations were under way, from the groups' event records, and how long the thread was on a core or in
the queue for one, from the kernel. What it did not compute while something was under way is exposed; as both are only
known as sums, exposed is taken to be as much as they allow. An operation that ran on the thread itself is exposed
however much it computed. So the estimate is too high where the thread slept for other reasons while operations ran.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np

from netfold.profile.record import RECORD, Records, records_of
from netfold.profile.recording import members


class LiveOverlap:
    """Looks at the thread that makes it."""

    def __init__(self) -> None:
        self._schedstat = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._read_up_to = {member.number: member.read(0)[0] for member in members()}
        self._at_ns, self._busy_ns = time.perf_counter_ns(), self._busy()

    def exposed_share(self, waited_s: float = 0.0) -> float | None:
        """Of the time since the last call, 0 to 1. waited_s: what the thread waited for other things meanwhile.

        None where there is no netfold group, or the kernel does not say what a thread did. Groups keep their newest
        8192 operations: of a stretch with more only these are seen.
        """
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
        """Of all groups, since the last call; None where there is no group."""
        there = members()
        if not there:
            return None
        found = [np.empty(0, RECORD)]
        for member in there:
            total, raw = member.read(self._read_up_to.get(member.number, 0))
            self._read_up_to[member.number] = total
            found.append(records_of(raw))
        return np.concatenate(found)

    def _busy(self) -> int | None:
        """Nanoseconds on a core and in the queue for one, since the thread began."""
        try:
            ran, queued, _ = self._schedstat.read_text().split()
        except (OSError, ValueError):
            return None
        return int(ran) + int(queued)


def _covered_ns(records: Records, since_ns: int) -> float:
    """How long at least one of them was under way."""
    if not len(records):
        return 0.0
    order = np.argsort(records["started_ns"])
    started = np.maximum(records["started_ns"][order], since_ns)
    finished = np.maximum(records["finished_ns"][order], since_ns)
    # Up to where all earlier ones reach: only what goes beyond that is new.
    reached = np.maximum.accumulate(np.concatenate([[since_ns], finished[:-1]]))
    return float(np.maximum(finished - np.maximum(started, reached), 0).sum())
