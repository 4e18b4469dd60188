"""Work and Future without a group: an operation that ends exactly while a thread checks it."""

from __future__ import annotations

import _thread
import itertools
import sys
import threading
from typing import Any

import pytest
from load import seconds

torch = pytest.importorskip("torch")

from netfold.torch import work as work_module  # noqa: E402
from netfold.torch.work import NetfoldWork  # noqa: E402

pytestmark = pytest.mark.torch

_ids = itertools.count(1 << 60)  # far from the engine's own


class Operation:
    """As the native operation, but the test decides when it ends."""

    def __init__(self, *, looks: int = 1 << 30) -> None:
        self.id = next(_ids)
        self.failure: Any = None
        self._looks = looks
        self._done = False

    @property
    def done(self) -> bool:
        """True from the `looks`-th check on."""
        self._looks -= 1
        return self._done or self._looks < 0

    def notify(self) -> bool:
        return not self._done

    def end(self) -> None:
        """As the engine does it: the id goes to a completion thread."""
        self._done = True
        work_module._completions._complete(self.id)


class Group:
    rank = 0

    def wait(self, operation: Operation, seconds: float | None = None) -> None:
        assert operation.done

    def check_can_end(self, operation: Operation) -> None:
        """No test here forks."""

    def error(self, operation: Operation) -> Exception:
        return ConnectionError(str(operation.failure))


def make(*operations: Operation, finish: Any = None) -> NetfoldWork:
    return NetfoldWork(Group(), list(operations), ["result"], finish=finish)  # type: ignore[arg-type]


def test_a_thread_without_a_frame_of_python_asks_for_a_future(monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP's reducer does so in a backward on a GPU, on autograd's thread of that device. A former fault: the
    look at the caller's frame raised "call stack is not deep enough", and no model on a GPU trained by DDP."""
    ended, errors = threading.Event(), list[Any]()
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: (errors.append(raised.exc_value), ended.set()))
    work = make(Operation())
    made = work.make_future

    def make_future() -> Any:
        future = made()
        ended.set()
        return future

    monkeypatch.setattr(work, "make_future", make_future, raising=False)
    _thread.start_new_thread(work.get_future, ())
    assert ended.wait(seconds(20)) and not errors


def test_a_future_requested_while_the_last_operation_settles_is_resolved_once() -> None:
    """A former fault: the caller's thread and the completion thread both resolved the Future. The second raised, and
    its thread ended silently."""
    operation = Operation()
    work = make(operation, finish=lambda: None)  # staged, and so watched from the start
    settle = work._settle
    asked = []

    def settle_and_ask() -> None:
        settle()
        asked.append(work.get_future())

    work._settle = settle_and_ask  # type: ignore[method-assign]
    operation.end()
    assert asked[0].wait() == ["result"]


def test_a_future_is_not_resolved_before_staged_results_are_copied_back() -> None:
    """A former fault: the count of pending operations was zero before the copy was made."""
    operation = Operation()
    copied: list[bool] = []
    work = make(operation, finish=lambda: copied.append(True))
    settle = work._settle
    early = []

    def ask_and_settle() -> None:
        early.append(work.get_future().done())
        settle()

    work._settle = ask_and_settle  # type: ignore[method-assign]
    operation.end()
    assert early == [False]
    assert work.get_future().wait() == ["result"]
    assert copied == [True]


def test_an_operation_that_ends_during_its_submission_is_settled() -> None:
    """A former fault: the operation ended between two checks, and no thread copied the result back."""
    copied: list[bool] = []
    work = make(Operation(looks=1), finish=lambda: copied.append(True))
    assert work.get_future().wait() == ["result"]
    assert copied == [True]


def test_an_error_while_results_are_copied_back_is_raised_by_every_wait() -> None:
    """A former fault: a tensor whose elements share memory ended the completion thread, and the Future hung."""

    def fail() -> None:
        raise RuntimeError("no room")

    for ended_before in (True, False):
        operation = Operation(looks=0 if ended_before else 1 << 30)
        work = make(operation, finish=fail)
        future = work.get_future()
        if not ended_before:
            operation.end()
        with pytest.raises(RuntimeError, match="no room"):
            future.wait()
        with pytest.raises(RuntimeError, match="no room"):
            work.wait()
        assert not work.is_success()
        assert "no room" in str(work.exception())


def test_a_future_of_several_operations_is_resolved_by_the_last() -> None:
    first, second = Operation(), Operation()
    future = make(first, second).get_future()
    second.end()
    assert not future.done()
    first.end()
    assert future.wait() == ["result"]


def test_a_failed_operation_fails_the_future_by_a_callback_that_raises() -> None:
    operation = Operation()
    work = make(operation)
    future = work.get_future()
    operation.failure = "rank 3 left"
    operation.end()
    with pytest.raises(Exception, match="rank 3 left"):
        future.wait()
    assert future.done()
    assert not work.is_success()


def test_every_request_gets_the_same_future() -> None:
    operation = Operation()
    work = make(operation)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(work.get_future())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    operation.end()
    assert len({id(future) for future in found}) == 1
    assert found[0].wait() == ["result"]
