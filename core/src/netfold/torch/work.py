"""Work and Future: how torch waits for a native operation.

C++ sees only `wait(timedelta)` and `get_future()` of a Python Work; `forwarding` has the rest. A Work whose operation
ended on the caller's thread is complete when it is made, and its Future resolves at once. Other Works are watched only
if their Future is used, or if staged results must be copied back: a thread switch costs more than a small operation.

Completion threads resolve the Futures, one completion each. torch runs a Future's callbacks on the resolving thread. A
callback that blocks on a later Future must not delay that Future, so several threads exist. The threads start with the
first watched operation and end before the interpreter.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from netfold._native import engine
from netfold.communicator import Group
from netfold.torch.forwarding import NetfoldWorkBase, resolved_future, seconds_of

# The number of threads that callbacks may block at once. Further completions wait until a callback returns.
_MAX_THREADS = 64
# Threads that wait for completions; further ones end.
_MAX_IDLE = 2
_IDLE_NS = 1_000_000_000


class NetfoldWork(NetfoldWorkBase):
    """The Work of one or several operations."""

    def __init__(
        self,
        group: Group,
        operations: Sequence[Any],
        result: Any,
        *,
        finish: Callable[[], None] | None = None,
    ) -> None:
        """Wrap submitted operations.

        result: the Future's value.
        finish: runs when all are done, before the Work is seen as complete (copies staged results back).
        """
        super().__init__()
        self._group = group
        self._operations = operations
        self._result = result
        self._finish = finish
        self._lock = threading.RLock()  # a signal handler may use the Work whose method it interrupts
        self._future: torch.futures.Future[Any] | None = None  # resolved by netfold
        self._visible: torch.futures.Future[Any]  # returned to users
        self._watched = False
        self._ended = False  # settled, so that a Future may be resolved
        self._finish_error: Exception | None = None
        for operation in operations:
            if not operation.done:
                if finish is not None:
                    self._watched = True
                    _completions.watch(self)
                return
        self._settle()
        self._ended = True

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until done; raise the operation's error. A timeout of 0 means none, as in torch."""
        if not self._ended:
            for operation in self._operations:
                self._group.wait(operation, seconds_of(timeout))
            self._settle()
            with self._lock:
                if not self._watched:
                    self._ended = True
        self._value(None)
        return True

    def is_completed(self) -> bool:
        if not self._ended:
            for operation in self._operations:
                if not operation.done:
                    return False
            self._settle()  # the caller may read the result next
        return True

    def exception(self) -> Any:
        for operation in self._operations:
            if operation.failure is not None:
                return self._group.error(operation)
        return self._finish_error

    def source_rank(self) -> int:
        return self._group.rank

    def make_future(self) -> torch.futures.Future[Any]:
        watch = False
        try:
            with self._lock:
                if self._future is None:
                    base: torch.futures.Future[Any] = torch.futures.Future()
                    if self._ended and self.exception() is None:
                        base.set_result(self._result)
                        self._visible = base
                    else:
                        # DDP's reducer crashes on a Future with an exception set, not on one whose callback raised.
                        self._visible = base.then(self._value)
                    self._future = base
                if self._ended and not self._watched and not self._future.done():
                    self._future.set_result(None)
                watch = not self._ended and not self._watched
                self._watched |= watch
            if watch:
                for operation in self._operations:
                    self._group.check_can_end(operation)
                _completions.watch(self)
        except BaseException:  # of a signal handler: the next call goes on
            self._watched &= not watch
            raise
        return self._visible

    def _settle(self) -> None:
        """Run `finish` once. Its exception becomes the Work's error."""
        if self._finish is not None:
            with self._lock:
                if self._finish is not None and self.exception() is None:
                    try:
                        self._finish()
                    except Exception as error:
                        self._finish_error = error
                self._finish = None  # set last: other threads then read the results

    def _end(self) -> torch.futures.Future[Any] | None:
        """End the Work. Returns the Future to resolve, None if there is none. A later Future resolves at once."""
        self._settle()
        with self._lock:
            if self._ended:
                return None
            self._ended = True
            return self._future


class CompletedWork(NetfoldWorkBase):
    """A Work that was complete without failure on submission."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def exception(self) -> Any:
        return None

    def make_future(self) -> torch.futures.Future[Any]:
        return resolved_future(self._result)


Work = CompletedWork | NetfoldWork


class _Completions:
    """Threads that turn completed operations into resolved Futures.

    A signal handler may watch a Work, or raise, at any bytecode of the thread that it interrupts. So the lock is
    re-entrant, and a thread counts itself.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._reset()

    def _reset(self) -> None:
        self._works: dict[int, NetfoldWork] = {}
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._stopping = False
        self._pid = os.getpid()

    def watch(self, work: NetfoldWork) -> None:
        """Keep `work` alive until its operations are done, then settle it and resolve its Future.

        After an exception, as of a signal handler, the Work is not watched.
        """
        if self._pid != os.getpid():
            self._lock = threading.RLock()  # a thread that is not in the child may have held it
            self._reset()  # a fork ends threads
        waiting = [operation for operation in work._operations if not operation.done]
        try:
            for operation in waiting:
                self._works[operation.id] = work
            if self._idle == 0:
                self._start()
            for operation in waiting:
                if not operation.notify():  # already done
                    self._complete(operation.id)
        except BaseException:
            for operation in waiting:
                self._works.pop(operation.id, None)
            raise
        if not waiting:  # all ended since the caller's check
            _resolve(work._end())

    def _start(self) -> None:
        if len(self._threads) < _MAX_THREADS and not self._stopping:
            threading.Thread(target=self._run, name="netfold-completions", daemon=True).start()

    def _run(self) -> None:
        thread = threading.current_thread()
        self._threads.add(thread)
        while True:
            with self._lock:
                if self._stopping or self._idle >= _MAX_IDLE:
                    self._threads.discard(thread)
                    return
                self._idle += 1
            operation_id = engine.next_completion(_IDLE_NS)
            with self._lock:
                self._idle -= 1
                is_last = self._idle == 0
            if operation_id is not None and not self._stopping:
                if is_last:
                    self._start()  # this thread may block in a callback
                self._complete(operation_id)

    def _complete(self, operation_id: int) -> None:
        work = self._works.pop(operation_id, None)
        if work is not None and all(operation.done for operation in work._operations):
            _resolve(work._end())

    def stop(self) -> None:
        if self._pid != os.getpid():
            return
        self._stopping = True
        engine.interrupt_completions()
        for thread in list(self._threads):
            thread.join(2.0)


def _resolve(future: torch.futures.Future[Any] | None) -> None:
    if future is not None:
        future.set_result(None)


_completions = _Completions()
atexit.register(_completions.stop)
