"""Record the communication of some steps for the run's page."""

from __future__ import annotations

import shutil
from pathlib import Path

from netfold import profile
from netfold.profile import recording
from netfold_train.callbacks.events import Callback, Ended, Started, Stepped
from netfold_train.runs import PROFILE

# The first steps are slower: they make buffers, and measure links.
_SKIPPED, _STEPS = 10, 50


class ProfileCallback(Callback):
    """Record steps 11 to 60 after a start, or fewer and earlier ones of a short run.

    Does nothing if the whole process is recorded already (`netfold profile run`).
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / PROFILE
        self._first = self._last = 0
        self._recording: recording.Recording | None = None

    def on_start(self, event: Started) -> None:
        left = event.steps - event.step
        self._first = event.step + min(_SKIPPED, left // 4)
        self._last = min(self._first + _STEPS, event.steps)
        if event.rank == 0 and recording.current() is None:
            # Remove an earlier start's profile, which may have more ranks. No rank records before all have done a step.
            shutil.rmtree(self._folder, ignore_errors=True)

    def on_step(self, event: Stepped) -> None:
        if self._recording is not None:
            profile.step()
            if event.step >= self._last:
                self._stop()
        elif event.step == max(1, self._first) and self._last > event.step and recording.current() is None:
            self._recording = recording.Recording(self._folder, replaces=True).start()
            profile.step()

    def on_end(self, event: Ended) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._recording is not None:
            self._recording.stop()
            self._recording = None
