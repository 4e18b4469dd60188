"""What interruptions have cost a run: a line that rank 0 rewrites each step, and the next life reads."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class Goodput:
    began_s: float
    """The first life's start, the time of day."""
    step: int = 0
    """The furthest that was reached."""
    ended: bool = False
    """By itself, or asked to: nothing was lost."""
    lost: int = 0
    """Lives that ended otherwise."""
    steps_repeated: int = 0
    seconds_lost: float = 0.0
    """From the moment that the checkpoint holds to the moment when training was there again."""

    def __str__(self) -> str:
        return (
            f"what failures cost: {self.lost} restarts of all ranks, {self.steps_repeated} steps done again, "
            f"{self.seconds_lost:.1f} s lost"
        )


class RestartLog:
    """The toll of one run, in a file that outlives a killed process: what is written is the kernel's at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.goodput = Goodput(began_s=time.time())
        self._first = not path.exists()
        # Empty: there was no room for the first line.
        if not self._first and (text := path.read_text()):
            self.goodput = Goodput(**json.loads(text))
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)

    def begin(self, step: int, taken_s: float | None) -> None:
        """A life that starts at `step`, from a checkpoint taken at that time of day, or from nothing."""
        toll = self.goodput
        if not self._first and not toll.ended:
            toll = replace(
                toll,
                lost=toll.lost + 1,
                steps_repeated=toll.steps_repeated + toll.step - step,
                seconds_lost=toll.seconds_lost + time.time() - (toll.began_s if taken_s is None else taken_s),
            )
        self._write(replace(toll, step=step, ended=False))

    def stepped(self, step: int) -> None:
        self._write(replace(self.goodput, step=step))

    def end(self) -> None:
        self._write(replace(self.goodput, ended=True))

    def close(self) -> None:
        os.close(self._file)

    def _write(self, toll: Goodput) -> None:
        self.goodput = toll
        # Of one length, in one write: a reader never sees half a line.
        # No room is the checkpoints' to speak of: it must not end a job that goes on without them.
        with contextlib.suppress(OSError):
            os.pwrite(self._file, f"{json.dumps(asdict(toll)):<255}\n".encode(), 0)
