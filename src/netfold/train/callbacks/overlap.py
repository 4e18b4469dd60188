"""A running estimate of how much of the time is exposed communication, for who looks while a job runs."""

from __future__ import annotations

import time

from netfold.profile.live import LiveOverlap
from netfold.train.events import Callback, Stepped

_EVERY_S = 0.5


class OverlapCallback(Callback):
    """`share`: of the time of the newest steps, half a second or more of them. Others read it; it tells nobody.

    None where it is not known: before the first half second, and where no netfold group is.
    """

    def __init__(self) -> None:
        self.share: float | None = None
        self._running: LiveOverlap | None = None
        self._began_s = self._data_s = 0.0

    def on_step(self, event: Stepped) -> None:
        now_s = time.perf_counter()
        if self._running is None:
            # From the thread that trains: it is the one to be looked at.
            self._running, self._began_s = LiveOverlap(), now_s
            return
        self._data_s += event.data_s
        if now_s - self._began_s < _EVERY_S:
            return
        self.share = self._running.exposed_share(self._data_s)
        self._began_s, self._data_s = now_s, 0.0
