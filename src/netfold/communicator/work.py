"""A handle on a collective that is under way."""

from __future__ import annotations

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
        _let_go(self)
        return self._result

    @property
    def result(self) -> Any:
        """What the blocking call would have returned; ValueError where it is not done yet, else as `wait`."""
        if not self.done:
            raise ValueError(f"rank {self._group.rank}: the operation is not done; call wait()")
        return self.wait()


class ReceiveWork(Work):
    """A receive: its result is the rank that sent."""

    def wait(self, timeout_s: float | None = None) -> Any:
        super().wait(timeout_s)
        return int(self._operation.peer)


# Works whose operation may still write, by id. One that was waited for is let go then; of others those that have ended,
# when there are twice as many as were under way the last time. Operations end, by their deadline at the latest.
_under_way: dict[int, Work] = {}
_sweep_at = _LEAST = 32
_lock = threading.Lock()


def _hold(work: Work) -> None:
    global _sweep_at
    with _lock:
        if len(_under_way) >= _sweep_at or len(_under_way) < _LEAST:
            for key in [key for key, each in _under_way.items() if each.done]:
                del _under_way[key]
            _sweep_at = max(_LEAST, 2 * len(_under_way))
        if not work.done:
            _under_way[id(work)] = work


def _let_go(work: Work) -> None:
    with _lock:
        _under_way.pop(id(work), None)
