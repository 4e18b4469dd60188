"""SIGTERM requests a stop: the step is finished, a checkpoint is written, and all ranks leave (Slurm, spot instances).

A request to one rank is enough: the next step vote tells all ranks. A second SIGTERM ends the process at once. The end
of the grace time does too, with every thread's traceback on stderr. As with any signal in Python, the main thread sees
the request when it returns from native code.

Before training there is nothing to save: a process that starts ranks leaves at once (`unwind_on_signals`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

# The exit status of a process that was asked to stop and can be started again: sysexits.h's EX_TEMPFAIL.
STOPPED_STATUS = 75
# The exit status after a PolicyStopError: another start would meet the same.
POLICY_STATUS = 3


class PolicyStopError(RuntimeError):
    """A policy of the recipe ("stop", or a limit) ends the run without a restart. Raised on all ranks alike."""


class StopRequest:
    """`asked` becomes True after SIGTERM while this is entered. On another thread than the main one it stays False."""

    def __init__(self, grace_s: float) -> None:
        self.asked = False
        self._grace_s = grace_s
        self._entered = 0
        self._before: Any = None

    def __enter__(self) -> StopRequest:
        self._entered += 1
        if self._entered == 1 and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._arrived) or signal.SIG_DFL
        return self

    def __exit__(self, *_: object) -> None:
        self._entered -= 1
        if self.asked:
            faulthandler.cancel_dump_traceback_later()
        if self._entered == 0 and self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def listen(self) -> None:
        """Enter, and never leave.

        If all ranks are asked, a rank may learn of the stop by the vote and leave before its own signal arrives. The
        late signal must not end it while it reports how it ended.
        """
        self.__enter__()

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # A C thread that ends the process with status 1: it needs neither the GIL nor the main thread.
        faulthandler.dump_traceback_later(self._grace_s, exit=True)


@contextlib.contextmanager
def unwind_on_signals() -> Iterator[None]:
    """Let a signal unwind a process that starts ranks through every `finally`, so no folder or process is left.

    The status is 128 + n after signal n, and STOPPED_STATUS after SIGTERM. While ranks run, the agent's own handlers
    replace these.
    """

    def leave(number: int, _: FrameType | None) -> None:
        sys.exit(STOPPED_STATUS if number == signal.SIGTERM else 128 + number)

    with handling(leave):
        yield


@contextlib.contextmanager
def handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Inside, `handler` gets the signals that ask a process to end. The main thread's."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
