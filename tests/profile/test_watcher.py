"""The watcher of the training thread: what it does in known shapes, as the share of time that it computed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks, values

from netfold import Communicator, FileStore, Options
from netfold._native import engine
from netfold.profile.run import PROGRESS

pytestmark = pytest.mark.native

MS = 1_000_000


def watch() -> Any:
    return engine.Watcher(threading.main_thread().ident, os.getpid())


def lines(watcher: Any) -> np.ndarray[Any, Any]:
    watcher.stop()
    taken = np.frombuffer(watcher.take(), PROGRESS)
    assert (np.diff(taken["at_ns"]) > 0).all()
    assert (np.diff(taken["busy_ns"]) >= 0).all()
    assert (np.diff(taken["busy_ns"]) <= np.diff(taken["at_ns"])).all(), "nobody computes for longer than time passes"
    return taken


class Stretch:
    """Wall and CPU time of what the main thread does within, and how much of it the watcher took for computing."""

    def __enter__(self) -> Stretch:
        self.cpu_ns = -time.thread_time_ns()
        self.began_ns = time.perf_counter_ns()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended_ns = time.perf_counter_ns()
        self.cpu_ns += time.thread_time_ns()
        self.wall_ns = self.ended_ns - self.began_ns

    def busy_ns(self, seen: np.ndarray[Any, Any]) -> float:
        began, ended = np.interp([self.began_ns, self.ended_ns], seen["at_ns"], seen["busy_ns"])
        return float(ended - began)


def burn(cpu_ns: int) -> None:
    until = time.thread_time_ns() + cpu_ns
    while time.thread_time_ns() < until:
        pass


def sleeps_then_burns(rank: int, size: int, folder: str) -> Any:
    watcher = watch()
    with Stretch() as slept:
        time.sleep(0.2)
    with Stretch() as burnt:
        burn(200 * MS)
    seen = lines(watcher)
    return slept.wall_ns, slept.busy_ns(seen), burnt.wall_ns, burnt.busy_ns(seen)


def test_a_thread_that_sleeps_does_not_compute_and_one_that_burns_does() -> None:
    slept_ns, slept_busy_ns, burnt_ns, burnt_busy_ns = values(run_ranks(sleeps_then_burns, 1))[0]
    assert slept_busy_ns < 0.1 * slept_ns
    assert burnt_busy_ns > 0.8 * burnt_ns, "also where others take its core"


def shares_a_core(rank: int, size: int, folder: str) -> Any:
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])  # inherits the core
    try:
        time.sleep(0.2)
        watcher = watch()
        with Stretch() as burnt:
            burn(200 * MS)
        seen = lines(watcher)
    finally:
        other.kill()
        other.wait()
    return burnt.wall_ns, burnt.cpu_ns, burnt.busy_ns(seen), watcher.sees_queue


def test_a_thread_that_waits_for_its_core_computes() -> None:
    wall_ns, cpu_ns, busy_ns, sees_queue = values(run_ranks(shares_a_core, 1))[0]
    assert sees_queue
    assert wall_ns > 1.5 * cpu_ns, "the other process took its share"
    assert busy_ns > 0.8 * wall_ns


def waits(rank: int, size: int, folder: str, options: dict[str, Any], asynchronous: bool) -> Any:
    array = np.ones(1000, np.float32)
    with Communicator(FileStore(folder), rank, size, options=Options(**options), timeout_s=30) as group:
        group.barrier()
        if rank == 1:
            time.sleep(0.5)
            group.all_reduce(array)
            group.barrier()
            return None
        watcher = watch()
        with Stretch() as waited:
            if asynchronous:
                group.all_reduce(array, asynchronous=True).wait()
            else:
                group.all_reduce(array)
        seen = lines(watcher)
        group.barrier()
        return waited.wall_ns, waited.cpu_ns, waited.busy_ns(seen)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("spins", [False, True])
def test_a_thread_that_waits_in_an_operation_does_not_compute(asynchronous: bool, spins: bool) -> None:
    options: dict[str, Any] = {"transport": "tcp", "probe": "off", "spin_us": 10_000_000 if spins else 0}
    wall_ns, cpu_ns, busy_ns = values(run_ranks(waits, 2, options, asynchronous))[0]
    assert wall_ns > 300 * MS
    # Who waits for an operation that was only started may find the engine's thread in it, which then spins instead.
    if spins and not asynchronous:
        assert cpu_ns > 5 * MS, "it span, as far as others let it, which is what must not count"
    assert busy_ns < 0.1 * wall_ns


def forks(rank: int, size: int, folder: str) -> Any:
    watcher = watch()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            watcher.stop()
            mine = watch()
            burn(20 * MS)
            code = 0 if lines(mine)["busy_ns"][-1] > 15 * MS else 2
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with pytest.raises(RuntimeError, match="watched already"):
        watch()
    return code, len(lines(watcher)) > 0


def test_a_forks_child_has_no_watcher_and_may_have_its_own() -> None:
    assert values(run_ranks(forks, 1)) == [(0, True)]


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def test_nobody_watches_after_stop() -> None:
    before = threads()
    watcher = watch()
    assert threads() == before + 1
    watcher.stop()
    assert threads() == before
    watcher.stop()
    watch().stop()
