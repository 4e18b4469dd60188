"""The engine keeps a bounded number of events, call sites, descriptors and threads, and loses nothing for the bound."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from load import seconds
from ranks import run_ranks, values

from netfold import Communicator, FileStore, Options
from netfold._native import engine
from netfold.communicator import CollectiveTimeout
from netfold.communicator.group import KINDS

pytestmark = pytest.mark.native


def native_group(size: int, group_id: int = 1) -> Any:
    """Rank 0 of a group on as many hosts, without connections, and without a thread that handles its events."""
    table = [(KINDS["barrier"], 0, engine.ALGORITHMS["direct"], -1, engine.ALGORITHMS["local"])]
    return engine.add_group(
        rank=0, nodes=list(range(size)), lanes=2, rails=1, connections=[], resumable=False, id=group_id, job="",
        spin_us=0, spins_for_sockets=False, yields=False, table=table, table_hash=1, fabric=None, rma_min_bytes=0,
    )  # fmt: skip


def requests(rank: int, size: int, folder: str) -> tuple[int, bool]:
    group = native_group(5001)
    for peer in range(1, 5001):
        for _ in range(2):
            group.submit(KINDS["send"], engine.DTYPES["u8"], 0, False, peer, [(0, 0)], [], None, 10**11, False)
    time.sleep(seconds(1))  # the engine uses the connections
    asked = set()
    while (event := engine.next_async_event(10**9)) is not None:
        asked.add((event[0], *event[2]))
    other = native_group(3, group_id=2)
    other.submit(KINDS["send"], engine.DTYPES["u8"], 0, False, 1, [(0, 0)], [], None, 10**11, False)
    engine.remove_group(other)
    left = engine.next_async_event(10**6)
    engine.remove_group(group)
    return len(asked), left is None


def test_every_connection_that_is_used_is_asked_for_once() -> None:
    assert values(run_ranks(requests, 1)) == [(5000, True)]


def test_call_sites_of_generated_functions_are_bounded(tmp_path: Any) -> None:
    codes = []
    with Communicator(FileStore(str(tmp_path)), 0, 1) as group:
        for _ in range(10_000):
            names: dict[str, Any] = {}
            exec(compile("def call(group):\n    group.barrier()\n", "/generated.py", "exec"), names)
            names["call"](group)
            codes.append(weakref.ref(names["call"].__code__))
    assert sum(code() is not None for code in codes) < 5_000


def few_descriptors(rank: int, size: int, folder: str) -> float:
    with Communicator(FileStore(folder), rank, size, options=Options(transport="tcp")) as group:
        # UBSan looks at the first object of a class by means of a pipe, which the limit forbids.
        group.all_reduce(np.ones(4))
        if rank == 1:
            time.sleep(1.5)
        else:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
        began = time.process_time()
        group.all_reduce(np.ones(4), asynchronous=True)
        group.all_reduce(np.ones(4))
        took = time.process_time() - began
        if rank == 0:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return took


def test_a_sleep_with_more_descriptors_than_the_limit_does_not_spin() -> None:
    assert values(run_ranks(few_descriptors, 2))[0] < 0.5


def tasks() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}


def blocked(task: int) -> int:
    status = Path(f"/proc/self/task/{task}/status").read_text().splitlines()
    return next(int(line.split()[1], 16) for line in status if line.startswith("SigBlk"))


def thread_of_the_engine(rank: int, size: int, folder: str) -> tuple[list[bool], bool, bool]:
    before = tasks()
    # No memory for the thread's stack; later ones may get that of a thread that ended.
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 20), hard))
    try:
        native_group(2)
        failed = False
    except OSError:
        failed = True
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    group = native_group(2, group_id=2)
    masks = [blocked(task) for task in tasks() - before]
    engine.remove_group(group)
    until = time.monotonic() + seconds(5)
    while tasks() != before and time.monotonic() < until:
        time.sleep(0.01)
    term = 1 << (signal.SIGTERM - 1) | 1 << (signal.SIGINT - 1)
    return [mask & term == term for mask in masks], failed, tasks() == before


def test_the_engines_thread_takes_no_signals_and_a_failed_start_leaves_no_group() -> None:
    assert values(run_ranks(thread_of_the_engine, 1)) == [([True], True, True)]


def stopped(rank: int, size: int, folder: str) -> list[bool]:
    """Rank 1 is stopped while it works on both ranks' tensors, for longer than rank 0 waits. Four attempts."""
    for attempt in range(4):
        with Communicator(FileStore(f"{folder}/{attempt}"), rank, size, timeout_s=30) as group:
            tensor = np.ones(1 << 25, np.float32)
            pids = group.all_gather(np.array([os.getpid()]))
            group.all_reduce(tensor)
            began = time.monotonic()
            group.all_reduce(tensor)
            took = time.monotonic() - began
            group.barrier()
            if rank == 1:
                try:
                    group.all_reduce(tensor)
                except Exception:
                    continue
                continue
            other = int(pids[1][0])
            threading.Timer(took * (attempt + 1) / 5, os.kill, (other, signal.SIGSTOP)).start()
            watched = weakref.ref(tensor)
            text = ""
            try:
                group.all_reduce(tensor, timeout_s=1.0)
            except CollectiveTimeout as error:
                text = str(error)
            del tensor
        with Communicator(FileStore(f"{folder}/alone{attempt}"), 0, 1) as alone:
            alone.barrier()
            during = watched() is not None
            os.kill(other, signal.SIGCONT)
            if "has been stopped while it reads or writes" not in text:
                continue
            os.kill(other, signal.SIGKILL)
            time.sleep(0.5)
        with Communicator(FileStore(f"{folder}/after{attempt}"), 0, 1) as alone:
            alone.barrier()
            return [during, watched() is not None]
    return []


def test_buffers_that_a_stopped_rank_may_write_to_stay_allocated_until_it_has_ended() -> None:
    kept = run_ranks(stopped, 2, dies=[1], timeout_s=120)[0]
    assert not kept.error, kept.text
    assert kept.value in ([True, False], []), kept.value
    assert kept.value, "rank 1 was never stopped inside a chunk"
