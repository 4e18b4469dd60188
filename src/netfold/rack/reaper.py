"""A process that outlives its rack's: it takes the rack away when that one has been killed without a word (SIGKILL)."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys

from netfold.rack import cleanup
from netfold.rack.command import RackError

# It has nothing left to do when it is let go.
_LEAVE_S = 10.0


class Reaper:
    """Stands by `rack_id` until it is let go, or this process dies. Cost: a Python of its own, started in the back."""

    def __init__(self, rack_id: str) -> None:
        # Nothing of ours is kept open by it: whoever reads our output sees its end when we have ended.
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"from {__name__} import reap_when_orphaned; reap_when_orphaned({rack_id!r}, {os.getpid()})",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def release(self) -> None:
        """The rack is gone, or this process is about to end and will not come back for it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def reap_when_orphaned(rack_id: str, owner: int) -> None:
    """The process itself: waits until standard input ends or `owner` has died, then removes what there is."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # A pipe alone would not do: what the owner forks holds it open, and lives on.
    with contextlib.suppress(ProcessLookupError):
        ended = os.pidfd_open(owner)
        if os.getppid() == owner:
            select.select([ended, sys.stdin], [], [])
    # `netfold rack down` says what cannot be taken away.
    with contextlib.suppress(RackError):
        cleanup.remove(rack_id)
