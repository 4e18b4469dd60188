"""Handles on operations that are under way."""

from __future__ import annotations

import threading
from typing import Any

from netfold.communicator.group import Group


class Work:
    """The handle that `asynchronous=True` returns. Thread-safe.

    The engine reads and writes the buffers until the operation is done, so they are kept alive until then, even if the
    caller drops the handle. The caller must not touch them before `wait` has returned.
    """

    def __init__(self, group: Group, operation: Any, buffers: Any, result: Any) -> None:
        self._group = group
        self._operation = operation
        self._buffers = buffers
        self._result = result
        _keep(self)

    @property
    def done(self) -> bool:
        """Whether the operation has ended, in success or failure. Never blocks."""
        return bool(self._operation.done)

    def wait(self, timeout_s: float | None = None) -> Any:
        """Wait for the operation; returns the blocking call's result.

        TimeoutError where only this wait ended: the operation goes on until its own deadline. Else raises the
        operation's error.
        """
        self._group.wait(self._operation, timeout_s)
        _release(self)
        return self._result

    @property
    def result(self) -> Any:
        """The blocking call's result; ValueError where the operation is not done yet, else as `wait`."""
        if not self.done:
            raise ValueError(f"rank {self._group.rank}: the operation is not done; call wait()")
        return self.wait()


class ReceiveWork(Work):
    """A receive, whose result is the sender's rank."""

    def wait(self, timeout_s: float | None = None) -> Any:
        super().wait(timeout_s)
        return int(self._operation.peer)


# By id, works whose operation may still use its buffers. `wait` removes its work. Other ended works are removed when
# there are twice as many works as after the last such sweep. Every operation ends by its deadline.
_under_way: dict[int, Work] = {}
_sweep_at = _LEAST = 32
_lock = threading.Lock()


def _keep(work: Work) -> None:
    global _sweep_at
    with _lock:
        if len(_under_way) >= _sweep_at or len(_under_way) < _LEAST:
            for key in [key for key, each in _under_way.items() if each.done]:
                del _under_way[key]
            _sweep_at = max(_LEAST, 2 * len(_under_way))
        if not work.done:
            _under_way[id(work)] = work


def _release(work: Work) -> None:
    with _lock:
        _under_way.pop(id(work), None)
