"""Where the ranks of a backend line up before a burst, all backends alike.

Each backend's own barrier would do it too, but would let its ranks go unevenly, by as much as a slow one takes; the
small calls timed right after it would pay for that.
"""

import mmap
import os
from pathlib import Path

_SLOT_BYTES = 8


class StartLine:
    """A slot of shared memory a rank, in which it writes how often it has arrived. Yields while it waits.

    The wait is bounded by the process's own alarm: a rank that is missing has failed, and the run ends with it.
    """

    def __init__(self, path: Path, rank: int, size: int) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), size * _SLOT_BYTES)
        self._slots = memoryview(self._memory).cast("q")
        self._rank = rank
        self._size = size
        self._crossed = 0

    @staticmethod
    def draw(path: Path, size: int) -> None:
        path.write_bytes(bytes(size * _SLOT_BYTES))

    def cross(self) -> None:
        self._crossed += 1
        self._slots[self._rank] = self._crossed
        for other in range(self._size):
            while self._slots[other] < self._crossed:
                os.sched_yield()
