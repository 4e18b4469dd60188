"""A second process that removes the rack when the rack's own process was killed (SIGKILL)."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys

from netfold_lab.rack import cleanup
from netfold_lab.rack.command import RackError

# A released reaper ends at once; wait at most this long for it.
_RELEASE_S = 10.0


class Reaper:
    """Watch over `rack_id` until `release`, or until this process ends. It costs a Python process in the background."""

    def __init__(self, rack_id: str) -> None:
        # The reaper holds none of this process's files open, so a reader of this output sees its end.
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
        """End the reaper; it removes what is left of the rack."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_RELEASE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def reap_when_orphaned(rack_id: str, owner: int) -> None:
    """Run the reaper: wait until standard input ends or the process `owner` has ended, then remove the rack."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # The pipe alone is not enough: children that the owner forked hold it open after the owner's end.
    with contextlib.suppress(ProcessLookupError):
        ended = os.pidfd_open(owner)
        if os.getppid() == owner:
            select.select([ended, sys.stdin], [], [])
    # `netfold rack down` reports what cannot be removed.
    with contextlib.suppress(RackError):
        cleanup.remove(rack_id)
