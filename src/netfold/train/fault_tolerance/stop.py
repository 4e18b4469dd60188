"""SIGTERM is a request: the step is finished, a checkpoint is written, and all ranks leave (Slurm, spot instances).

One rank that is asked is enough: the others hear it in the next word (`step_vote.py`). A second SIGTERM ends the
process at once, and so does the end of the grace time, with every thread's traceback on stderr. As with any signal in
Python, the request is seen when the main thread is back from native code.

Before training there is nothing to save: a process that starts ranks leaves at once (`unwind_on_signals`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

# What a process leaves with that was asked to stop and is to be started again: sysexits.h's EX_TEMPFAIL.
STOPPED_STATUS = 75
# What it leaves with after a PolicyStopError: another try would meet the same again.
POLICY_STATUS = 3


class PolicyStopError(RuntimeError):
    """A policy of the recipe ("stop", or a limit) ends the run: no restart is tried. Raised on all ranks alike."""


class StopRequest:
    """`asked` is True once SIGTERM has come. Of the main thread; on another one there is nothing to see."""

    def __init__(self, grace_s: float) -> None:
        self.asked = False
        self._grace_s = grace_s
        self._listens = self._restores = False
        self._before: Any = None

    def listen(self) -> None:
        """From now on, to the end of this process.

        Where all ranks are asked, one may hear of it by the word, and leave, before its own signal comes: it says
        nothing new, and must not end a rank that is about to say how it ended.
        """
        self._listens = threading.current_thread() is threading.main_thread()
        if self._listens:
            self._before = signal.signal(signal.SIGTERM, self._arrived)

    def __enter__(self) -> StopRequest:
        if not self._listens:
            self.listen()
            self._restores = self._listens
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.asked:
            faulthandler.cancel_dump_traceback_later()
        if self._restores:
            self._listens = self._restores = False
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # A thread of C that ends the process with status 1: it needs neither the GIL nor the main thread.
        faulthandler.dump_traceback_later(self._grace_s, exit=True)


@contextlib.contextmanager
def unwind_on_signals() -> Iterator[None]:
    """Of a process that starts ranks: a signal goes through every `finally`, so no folder and no process is left.

    The status is 128 + n after signal n, and STOPPED_STATUS after SIGTERM. While ranks run, the agent's own handlers
    take this one's place.
    """

    def leave(number: int, _: FrameType | None) -> None:
        sys.exit(STOPPED_STATUS if number == signal.SIGTERM else 128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
