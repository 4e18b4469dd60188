"""Handles on operations that are under way."""

from __future__ import annotations

from typing import Any

from netfold.communicator.group import Group


class Work:
    """The handle that `asynchronous=True` returns. Thread-safe.

    The engine reads and writes the buffers until the operation is done, and keeps them alive until then, even if the
    caller drops the handle. The caller must not touch them before `wait` has returned.
    """

    def __init__(self, group: Group, operation: Any, result: Any) -> None:
        self._group = group
        self._operation = operation
        self._result = result

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
