"""The sampler of the training thread, against threads whose share of computing is known."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
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
    return engine.ComputeSampler(threading.main_thread().ident, os.getpid())


def lines(watcher: Any) -> np.ndarray[Any, Any]:
    watcher.stop()
    taken = np.frombuffer(watcher.take(), PROGRESS)
    assert (np.diff(taken["at_ns"]) > 0).all()
    assert (np.diff(taken["busy_ns"]) >= 0).all()
    assert (np.diff(taken["busy_ns"]) <= np.diff(taken["at_ns"])).all(), "more computing than time"
    return taken


class Stretch:
    """Wall and CPU time of the main thread in the block, and the part that the sampler counted as computing."""

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
    # The thread slept for 200 ms; the rest of that stretch it waited for a core.
    assert slept_busy_ns < 0.1 * 200 * MS + (slept_ns - 200 * MS)
    assert burnt_busy_ns > 0.8 * burnt_ns, "also where others take its core"


def shares_a_core(rank: int, size: int, folder: str) -> Any:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    reader, writer = os.pipe()
    other = os.fork()  # inherits the core
    if other == 0:
        os.write(writer, b"x")
        while True:
            pass
    try:
        os.read(reader, 1)  # it runs
        watcher = watch()
        with Stretch() as burnt:
            burn(200 * MS)
        seen = lines(watcher)
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
    return burnt.wall_ns, burnt.cpu_ns, burnt.busy_ns(seen), watcher.sees_queue


def test_a_thread_that_waits_for_its_core_computes() -> None:
    wall_ns, cpu_ns, busy_ns, sees_queue = values(run_ranks(shares_a_core, 1))[0]
    assert sees_queue
    assert wall_ns > 1.5 * cpu_ns, "the other process took its share"
    assert busy_ns > 0.8 * wall_ns


def waits(rank: int, size: int, folder: str, options: dict[str, Any], asynchronous: bool) -> Any:
    array, watches = np.ones(1000, np.float32), Path(folder, "watches")
    with Communicator(FileStore(f"{folder}/store"), rank, size, options=Options(**options), timeout_s=30) as group:
        group.barrier()
        if rank == 1:
            while not watches.exists():
                time.sleep(0.01)
            time.sleep(0.5)
            group.all_reduce(array)
            group.barrier()
            return None
        watcher = watch()
        watches.touch()
        with Stretch() as waited:
            began_ns = time.perf_counter_ns()
            if asynchronous:
                group.all_reduce(array, asynchronous=True).wait()
            else:
                group.all_reduce(array)
            in_call_ns = time.perf_counter_ns() - began_ns
        seen = lines(watcher)
        group.barrier()
        return waited.wall_ns, in_call_ns, waited.cpu_ns, waited.busy_ns(seen)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("spins", [False, True])
def test_a_thread_that_waits_in_an_operation_does_not_compute(asynchronous: bool, spins: bool) -> None:
    options: dict[str, Any] = {"transport": "tcp", "probe": "off", "spin_us": 10_000_000 if spins else 0}
    wall_ns, in_call_ns, cpu_ns, busy_ns = values(run_ranks(waits, 2, options, asynchronous))[0]
    assert in_call_ns > 300 * MS
    # A thread that waits for a started operation may find the engine's thread driving it, which then spins instead.
    if spins and not asynchronous:
        assert cpu_ns > MS, "it span, as far as other processes let it, which is what must not count"
    # Outside of the call the thread computes or waits for its core.
    assert busy_ns < 0.2 * in_call_ns + (wall_ns - in_call_ns)


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
    with pytest.raises(RuntimeError, match="runs in this process already"):
        watch()
    return code, len(lines(watcher)) > 0


def test_the_child_of_a_fork_has_no_sampler_and_may_start_one() -> None:
    assert values(run_ranks(forks, 1)) == [(0, True)]


def threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def test_no_samples_are_taken_after_stop() -> None:
    before = threads()  # threads of groups of earlier tests may still be ending
    watcher = watch()
    (watching,) = threads() - before
    watcher.stop()
    assert watching not in threads()
    watcher.stop()
    watch().stop()
    assert not threads() - before
