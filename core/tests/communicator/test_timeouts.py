"""One rule for each timeout of the Python interface: netfold.options.timeout_seconds."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from load import seconds
from ranks import run_threads, values

from netfold import Communicator, FileStore
from netfold.bootstrap.tcp_store import TcpStore
from netfold.communicator import CollectiveTimeout, NetfoldError
from netfold.errors import WaitTimeout
from netfold.options import MOST_TIMEOUT_S, timeout_seconds

pytestmark = pytest.mark.native

PASSED = (0, 0.0, -0.2, -1e10, -math.inf)
LONG = (1e9, 8.64e13, math.inf)
SLOW_S = 5.0

Calls = dict[str, Callable[[Communicator, Any], Any]]


def _array() -> np.ndarray[Any, Any]:
    return np.ones(2, np.float32)


# Each ends only when the other rank calls, which it does after every timeout that is to pass.
OPERATIONS: Calls = {
    "all_reduce": lambda group, timeout_s: group.all_reduce(_array(), timeout_s=timeout_s),
    "all_reduce with out": lambda group, timeout_s: group.all_reduce(_array(), _array(), timeout_s=timeout_s),
    "all_reduce_loc": lambda group, timeout_s: group.all_reduce_loc(
        _array(), np.zeros(2, np.int64), op="min_loc", timeout_s=timeout_s
    ),
    "reduce": lambda group, timeout_s: group.reduce(_array(), timeout_s=timeout_s),
    "broadcast": lambda group, timeout_s: group.broadcast(_array(), 1, timeout_s=timeout_s),
    "all_gather": lambda group, timeout_s: group.all_gather(_array(), timeout_s=timeout_s),
    "gather": lambda group, timeout_s: group.gather(_array(), timeout_s=timeout_s),
    "scatter": lambda group, timeout_s: group.scatter([_array()] * 2, _array(), 1, timeout_s=timeout_s),
    "reduce_scatter": lambda group, timeout_s: group.reduce_scatter([_array()] * 2, timeout_s=timeout_s),
    "all_to_all": lambda group, timeout_s: group.all_to_all([_array()] * 2, [_array(), _array()], timeout_s=timeout_s),
    "barrier": lambda group, timeout_s: group.barrier(timeout_s=timeout_s),
    "receive": lambda group, timeout_s: group.receive(_array(), 1, timeout_s=timeout_s),
    "work.wait": lambda group, timeout_s: group.all_reduce(_array(), asynchronous=True).wait(timeout_s),
    "receive.wait": lambda group, timeout_s: group.receive(_array(), 1, asynchronous=True).wait(timeout_s),
    "group's": lambda group, timeout_s: _with_group_timeout(group, timeout_s),
}


def _with_group_timeout(group: Communicator, timeout_s: float) -> None:
    group.group.timeout_s = timeout_s
    group.barrier()


def test_a_timeout_is_clamped_and_nan_is_refused() -> None:
    assert [timeout_seconds(each) for each in PASSED] == [0.0] * len(PASSED)
    assert [timeout_seconds(each) for each in LONG] == [MOST_TIMEOUT_S] * len(LONG)
    assert (timeout_seconds(None), timeout_seconds(None, 3.0), timeout_seconds(2.5, 3.0)) == (MOST_TIMEOUT_S, 3.0, 2.5)
    with pytest.raises(ValueError, match="NaN"):
        timeout_seconds(math.nan)


def _passed(rank: int, size: int, folder: str, name: str, over: threading.Event, timeout_s: float) -> str:
    with Communicator(FileStore(folder), rank, size, timeout_s=60.0) as group:
        group.barrier()
        if rank == 1:
            over.wait(seconds(60))
            return ""
        began = time.monotonic()
        try:
            with pytest.raises(ValueError, match="NaN"):
                OPERATIONS[name](group, math.nan)
            OPERATIONS[name](group, timeout_s)
        except (NetfoldError, TimeoutError) as error:
            assert time.monotonic() - began < seconds(SLOW_S)
            return type(error).__name__
        finally:
            over.set()
        return "nothing was raised"


@pytest.mark.parametrize("timeout_s", [0, -0.2, -math.inf])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_timeout_of_nothing_or_less_has_passed(name: str, timeout_s: float) -> None:
    wants = WaitTimeout if name.endswith(".wait") else CollectiveTimeout
    assert values(run_threads(_passed, 2, name, threading.Event(), timeout_s))[0] == wants.__name__


def _long(rank: int, size: int, folder: str, timeout_s: float) -> list[str]:
    group = Communicator(FileStore(folder), rank, size, timeout_s=timeout_s, join_timeout_s=timeout_s)
    with group:
        for name, call in OPERATIONS.items():
            if name.startswith("receive") and rank == 1:
                group.send(_array(), 0, timeout_s=timeout_s)
            else:
                call(group, timeout_s)
        group.split(0, timeout_s=timeout_s).close()
    return list(OPERATIONS)


@pytest.mark.parametrize("timeout_s", LONG)
def test_an_endless_timeout_is_one(timeout_s: float) -> None:
    assert values(run_threads(_long, 2, timeout_s)) == [list(OPERATIONS)] * 2


@pytest.mark.parametrize("timeout_s", PASSED)
def test_starting_with_a_timeout_that_has_passed_ends_at_once(timeout_s: float, tmp_path: Any) -> None:
    store = FileStore(tmp_path)
    starts: list[Callable[[], Any]] = [
        lambda: store.get("nobody sets this", timeout_s),
        lambda: Communicator(store, 1, 2, join_timeout_s=timeout_s),
        lambda: TcpStore("127.0.0.1", 1, "nobody", serve=False, timeout_s=timeout_s),
    ]
    for start in starts:
        began = time.monotonic()
        with pytest.raises((TimeoutError, NetfoldError)):
            start()
        assert time.monotonic() - began < seconds(SLOW_S)


def _shrinks(rank: int, size: int, folder: str) -> int:
    with Communicator(FileStore(folder), rank, size) as group:
        if rank < 2:
            group.shrink([2], timeout_s=math.inf)
        return group.size


def test_a_new_group_takes_an_endless_timeout() -> None:
    assert values(run_threads(_shrinks, 3)) == [2, 2, 3]
