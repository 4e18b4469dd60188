"""The point where the ranks of a backend wait for each other before a burst, the same for all backends.

A backend's own barrier releases its ranks at different times. The times of the small calls behind it would include
that difference.
"""

import mmap
import os
from pathlib import Path

_SLOT_BYTES = 8


class StartLine:
    """A file of shared memory with a slot for each rank, which holds how often the rank has arrived.

    A waiting rank yields its core. It waits without a limit of its own: a rank is missing only where it has failed,
    and then the run ends, or the process's alarm does it.
    """

    def __init__(self, path: Path, rank: int, size: int) -> None:
        # The first rank makes the file, of zeros.
        with path.open("a+b") as file:
            file.truncate(size * _SLOT_BYTES)
            self._memory = mmap.mmap(file.fileno(), size * _SLOT_BYTES)
        self._slots = memoryview(self._memory).cast("q")
        self._rank = rank
        self._size = size
        self._crossed = 0

    def cross(self) -> None:
        """Wait until every rank has crossed as often as this one."""
        self._crossed += 1
        self._slots[self._rank] = self._crossed
        for other in range(self._size):
            while self._slots[other] < self._crossed:
                os.sched_yield()
