"""The base class of netfold's Works, and the forwarding of all their methods on torch 2.14 and newer.

A Work that a Python `Backend` returns reaches the caller inside a C++ object, the holder (PyWorkHolder in
c10d/py/PyProcessGroup.hpp in torch's wheel). The holder forwards only `wait` and `get_future`. It inherits its other
methods: `is_completed()` is always False, `source_rank()` raises, `synchronize()` does nothing. The trampoline cannot
override them. So `forward_work_methods` replaces these methods of `dist.Work` by functions that look for a netfold Work
inside a holder and otherwise call torch's method. Works of other backends behave as before.

The look-up calls `get_future`, which the holder forwards on the calling thread. While a thread-local flag is set, a
netfold Work stores itself in a thread-local variable instead of making a Future.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PythonCallbackWork

from netfold.torch.autograd_frame import is_autograds
from netfold.torch.typed_future import future_of_tensors

_METHODS = (
    "is_completed", "is_success", "exception", "result", "synchronize", "block_current_stream", "source_rank",
    "_source_rank",
)  # fmt: skip


class _LookUp(threading.local):
    wanted = False
    found: NetfoldWorkBase | None = None


_look_up = _LookUp()


class NetfoldWorkBase(dist.Work):
    """A Work of netfold. Subclasses define `make_future` in place of torch's `get_future`."""

    _operations: Sequence[Any] = ()  # the native operations to wait for
    _result: Any  # the Future's value

    def synchronize(self) -> None:
        self.wait()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> torch.futures.Future[Any]:
        if _look_up.wanted:
            _look_up.found = self
            return resolved_future(None)
        if is_autograds(1) and self._is_half():
            return self.make_future_of_tensors()
        return self.make_future()

    def make_future_of_tensors(self) -> torch.futures.Future[Any]:
        """The Future of this Work's list of tensors, for a hook in C++."""
        return future_of_tensors(self.make_future(), self.result())

    def make_future(self) -> torch.futures.Future[Any]:
        """The Future of this Work's result."""
        raise NotImplementedError

    def result(self) -> Any:
        return self._result

    def _value(self, _: Any) -> Any:
        """Return the result, or raise the error. The callback of a Future."""
        error = self.exception()
        if error is not None:
            raise error
        return self._result

    def boxed(self) -> Any:
        # torch's box of a Python Work keeps only the C++ half, whose wait() never returns.
        return PythonCallbackWork(self.wait).boxed()

    def block_current_stream(self) -> None:
        self.wait()

    def _is_half(self) -> bool:
        result = self.result()
        return isinstance(result, list) and len(result) == 1 and getattr(result[0], "dtype", None) is torch.float16


def resolved_future(result: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return future


def seconds_of(timeout: timedelta | None) -> float | None:
    """A timeout of torch in seconds; None for no timeout, which torch writes as 0, None or a negative time."""
    return timeout.total_seconds() if timeout and timeout.days >= 0 else None


def python_work(work: dist.Work) -> NetfoldWorkBase | None:
    """Return the netfold Work inside a holder, None for a Work of another backend."""
    _look_up.wanted, _look_up.found = True, None
    try:
        work.get_future()
    except RuntimeError:  # this Work has no Future
        pass
    finally:
        _look_up.wanted = False
    found, _look_up.found = _look_up.found, None
    return found


@functools.cache
def forward_work_methods() -> None:
    """Have `dist.Work` forward its methods to netfold's Works. Idempotent; for torch 2.14 and newer."""
    for name in _METHODS:
        setattr(dist.Work, name, _forwarding(name, getattr(dist.Work, name)))


def _forwarding(name: str, original: Callable[[dist.Work], Any]) -> Callable[[dist.Work], Any]:
    @functools.wraps(original)
    def method(self: dist.Work) -> Any:
        found = python_work(self) if type(self) is dist.Work else None
        return original(self) if found is None else getattr(found, name)()

    return method
