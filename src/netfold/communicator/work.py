"""A handle on a collective that is under way."""

from __future__ import annotations

import collections
import threading
from typing import Any

from netfold.communicator.group import Group


class Work:
    """What `asynchronous=True` returns. Thread-safe.

    It holds the buffers, and they are held until the operation is done even where nobody keeps the handle: the engine
    writes into them. The caller must not touch them before `wait` has returned.
    """

    def __init__(self, group: Group, operation: Any, buffers: Any, result: Any) -> None:
        self._group = group
        self._operation = operation
        self._buffers = buffers
        self._result = result
        _hold(self)

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not. Never blocks."""
        return bool(self._operation.done)

    def wait(self, timeout_s: float | None = None) -> Any:
        """Wait for it; what the blocking call would have returned.

        TimeoutError when only this waiting ended (the operation goes on, and has a deadline of its own); else raises
        what befell it.
        """
        self._group.wait(self._operation, timeout_s)
        _hold(None)
        return self._result

    @property
    def result(self) -> Any:
        """What the blocking call would have returned; ValueError where it is not done yet, else as `wait`."""
        if not self.done:
            raise ValueError(f"rank {self._group.rank}: the operation is not done; call wait()")
        return self.wait()


class Receiving(Work):
    """A receive: its result is the rank that sent."""

    def wait(self, timeout_s: float | None = None) -> Any:
        super().wait(timeout_s)
        return int(self._operation.peer)


# Works whose operation may still write. Operations end, by their deadline at the latest, so this cannot grow without
# end: what has ended is let go whenever one begins or was waited for.
_under_way: collections.deque[Work] = collections.deque()
_lock = threading.Lock()


def _hold(work: Work | None) -> None:
    with _lock:
        while _under_way and _under_way[0].done:
            _under_way.popleft()
        if work is not None and not work.done:
            _under_way.append(work)
