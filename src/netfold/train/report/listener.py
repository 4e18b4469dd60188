"""Write a run's page at evaluations and at the end of the run."""

from __future__ import annotations

import time
from pathlib import Path

from netfold.train.events import Callback, Ended, Evaluated, Started
from netfold.train.report import write_report
from netfold.train.report.pictures import write_pictures

# All ranks wait while rank 0 writes. Writing takes at most this fraction (1/200) of the time before the end.
_RARE = 200


class ReportCallback(Callback):
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._next_s = 0.0
        self._steps = 0

    def on_start(self, event: Started) -> None:
        self._steps = event.steps

    def on_evaluation(self, event: Evaluated) -> None:
        if event.pictures:
            write_pictures(self._folder, event.step, event.pictures)
        began_s = time.monotonic()
        if began_s < self._next_s or event.step == self._steps:  # the end comes next
            return
        write_report(self._folder)
        ended_s = time.monotonic()
        self._next_s = ended_s + _RARE * (ended_s - began_s)

    def on_end(self, event: Ended) -> None:
        write_report(self._folder)
