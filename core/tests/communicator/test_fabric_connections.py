"""Streams over a fabric are made when an algorithm first needs a rank: how many, both ways at once, beside deaths."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fabrics import need_libfabric
from load import settles
from ranks import run_ranks, run_threads, values
from test_fabric import LOOPBACK, join

from netfold import Communicator
from netfold._native import fabric
from netfold.bootstrap.fabric import port_of
from netfold.errors import NetfoldError

need_libfabric()

pytestmark = pytest.mark.native

RING = "all_reduce=ring,all_to_all=pairwise"


def counted(provider: str = "tcp") -> tuple[int, int]:
    """Open streams and addresses of peers of this process."""
    counters = port_of(provider, LOOPBACK).counters
    return counters["streams"], counters["addresses"]


def await_all(name: str, rank: int, size: int, folder: str) -> None:
    """A barrier without a message of netfold."""
    Path(folder, f"{name}.{rank}").touch()
    assert settles(lambda: len(list(Path(folder).glob(f"{name}.*"))) == size)


def counts_streams(rank: int, size: int, folder: str, probe: str) -> list[tuple[int, int, int]]:
    found: list[tuple[int, int, int]] = []

    def count() -> None:
        found.append((*counted(), port_of("tcp", LOOPBACK).counters["receive_bytes"]))
        await_all(f"counted {len(found)}", rank, size, folder)

    with join(rank, size, folder, "tcp", algorithm=RING, probe=probe) as group:
        count()
        mine = np.full(1000, rank)
        group.all_reduce(mine)
        np.testing.assert_array_equal(mine, np.full(1000, size * (size - 1) // 2))
        count()
        into = np.zeros(size, np.int64)
        group.all_to_all(np.arange(size) + 10 * rank, into)
        np.testing.assert_array_equal(into, 10 * np.arange(size) + rank)
        count()
    return found


def test_a_rank_has_streams_and_receive_buffers_only_for_the_ranks_that_an_algorithm_needed() -> None:
    size = 6
    window_bytes = 16 * port_of("tcp", LOOPBACK).segment_bytes
    for found in values(run_ranks(counts_streams, size, "off")):
        assert found == [(0, 0, 0), (2, 2, 2 * window_bytes), (size - 1, size - 1, (size - 1) * window_bytes)], found


def test_the_probe_leaves_no_stream() -> None:
    found = values(run_ranks(counts_streams, 3, "on"))
    assert [each[0][0] for each in found] == [0, 0, 0], found


def sums_once(rank: int, size: int, folder: str) -> int:
    with join(rank, size, folder, "tcp", algorithm="ring") as group:
        for count in (1, 10_007):
            mine = np.arange(count) * (rank + 1)
            group.all_reduce(mine)
            np.testing.assert_array_equal(mine, np.arange(count) * (size * (size + 1) // 2))
        # The barrier's own algorithm needs more streams.
        await_all("reduced", rank, size, folder)
        after = counted()[0]
        await_all("counted", rank, size, folder)
        group.barrier()
    return after


def test_a_group_of_48_ranks_in_one_process_starts_and_needs_streams_to_neighbours_only() -> None:
    """Streams for all pairs of these ranks, on two lanes, would be 4512: more than a process can have."""
    size = 48
    assert port_of("tcp", LOOPBACK).counters["max_streams"] == 1024
    found = values(run_threads(sums_once, size, timeout_s=60))
    assert max(found) <= 2 * size, found


def dies(rank: int, size: int, folder: str, moment: str, call: str) -> str:
    group = join(rank, size, folder, "tcp", algorithm="ring")
    mine = np.ones(1000)
    if moment == "after":
        group.all_reduce(mine)
    if rank == 1 and moment == "while":
        threading.Thread(target=dies_at_its_first_stream, daemon=True).start()
    elif rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if call == "reduces":
            group.all_reduce(mine)
        elif rank == 1:
            group.send(mine, 0)
        elif call == "receives":
            group.receive(mine, 1)
        else:
            group.receive(mine, None)
        # The bytes may have come before the death.
        group.all_reduce(mine)
        group.all_reduce(mine)
        return "nothing went wrong"
    except NetfoldError as error:
        return f"{type(error).__name__} {error.rank}: {error}"
    finally:
        group.close()


def dies_at_its_first_stream() -> None:
    port = port_of("tcp", LOOPBACK)
    while port.counters["streams"] == 0:
        pass
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("call", ["reduces", "receives", "receives_from_any"])
@pytest.mark.parametrize("moment", ["before", "while", "after"])
def test_the_death_of_a_rank_about_its_first_stream_is_the_verdict_of_every_rank(moment: str, call: str) -> None:
    size = 4 if call == "reduces" else 2
    found = run_ranks(dies, size, moment, call, dies=[1])
    for rank in (each for each in range(size) if each != 1):
        assert not found[rank].error, found[rank]
        assert found[rank].value.startswith("PeerLost 1: "), found


def receives_from_any(rank: int, size: int, folder: str) -> list[int]:
    found, provider = [], "strict:seed=5+tcp"
    with join(rank, size, folder, provider, algorithm="ring") as group:
        if rank == 0:
            # Of any size: in segments, and in granted memory.
            for count, turn in ((3, 3), (100_003, 2), (7, 1)):
                if turn != 3:
                    group.send(np.array([turn]), turn)
                into = np.zeros(count, np.int64)
                assert group.receive(into, None) == turn
                np.testing.assert_array_equal(into, np.arange(count) * turn)
                found.append(counted(provider)[0])
        else:
            if rank == 3:
                # Rank 0's long wait has made a connection here. It waits for a stream as well as it waits for a death.
                made = group.group._monitor.first_connections._made
                assert settles(lambda: (0, 1, 0) in made)
                assert counted(provider)[0] == 0
            else:
                group.receive(np.zeros(1, np.int64), 0)
            count = {1: 7, 2: 100_003, 3: 3}[rank]
            group.send(np.arange(count) * rank, 0)
        await_all("done", rank, size, folder)
    return found


def test_a_receive_from_any_rank_opens_a_stream_only_to_the_rank_that_sends() -> None:
    assert values(run_ranks(receives_from_any, 4))[0] == [1, 2, 3]


def both_ways(rank: int, size: int, folder: str, start: threading.Barrier) -> None:
    for turn in range(8):
        with join(rank, size, f"{folder}/{turn}", "strict:seed=9+tcp", algorithm="ring") as group:
            other = 1 - rank
            start.wait()
            for tag, count in enumerate((5, 100_003)):
                sent = group.send(np.arange(count) + rank, other, tag=tag, asynchronous=True)
                into = np.zeros(count, np.int64)
                group.receive(into, other, tag=tag)
                np.testing.assert_array_equal(into, np.arange(count) + other)
                sent.wait()


def test_both_ranks_make_a_stream_at_once() -> None:
    values(run_threads(both_ways, 2, threading.Barrier(2), timeout_s=60))


def sends_and_closes(rank: int, size: int, folder: str) -> str:
    group = join(rank, size, folder, "tcp")
    if rank == 0:
        group.send(np.arange(1000), 1)
        group.close()
        Path(folder, "closed").touch()
        return ""
    assert settles(Path(folder, "closed").exists)
    into = np.zeros(1000, np.int64)
    group.receive(into, 0)
    np.testing.assert_array_equal(into, np.arange(1000))
    try:
        group.receive(into, 0)
    except NetfoldError as error:
        return f"{type(error).__name__} {error.rank}"
    finally:
        group.close()
    return "nothing went wrong"


def test_a_close_that_crosses_the_first_connection_loses_no_byte() -> None:
    assert values(run_threads(sends_and_closes, 2))[1] == "PeerLost 0"


def fails_before_its_streams(rank: int, size: int, folder: str) -> str:
    group = join(rank, size, folder, "tcp", algorithm="ring")
    timed_out = Path(folder, "timed out")
    try:
        if rank == 0:
            group.all_reduce(np.ones(10), timeout_s=0.3)
        assert settles(timed_out.exists)
        group.all_reduce(np.ones(10))
    except NetfoldError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        timed_out.touch()
        group.close()
    return "nothing went wrong"


def test_a_failure_before_the_first_stream_reaches_every_rank_with_its_reason() -> None:
    first, *others = values(run_threads(fails_before_its_streams, 3))
    assert first.startswith("CollectiveTimeout: "), first
    for said in others:
        assert "(its timeout is 0.3 s)" in said, others


def sub_groups(rank: int, size: int, folder: str) -> list[int]:
    with join(rank, size, folder, "tcp", algorithm="ring") as group:
        half = group.split(rank % 2)
        assert half is not None
        with half:
            mine = np.array([rank])
            half.all_reduce(mine)
            assert mine[0] == sum(each for each in range(size) if each % 2 == rank % 2)
            of_half = counted()[0]
        handles = group.handles
        group.reconfigure("smaller", [handles[2], handles[0]] if rank in (0, 2) else [handles[3], handles[1]])
        mine = np.array([rank])
        group.all_reduce(mine)
        assert mine[0] == (2 if rank in (0, 2) else 4)
        settles(lambda: counted()[0] == 1)  # the former group ends meanwhile
        return [of_half, counted()[0]]


def test_sub_groups_and_next_generations_make_streams_of_their_own() -> None:
    for of_half, of_next in values(run_ranks(sub_groups, 4)):
        assert of_half >= 1
        assert of_next == 1


def test_streams_beyond_the_bound_are_refused_with_the_bound() -> None:
    port = fabric.StreamMux("tcp", list(LOOPBACK))
    doorbell = fabric.make_doorbell()
    most = port.counters["max_streams"]
    streams = [port.open(doorbell) for _ in range(most)]
    with pytest.raises(fabric.FabricError, match=rf"has {most} streams over provider tcp;ofi_rxm, .*NETFOLD_ALGORITHM"):
        port.open(doorbell)
    assert port.counters["receive_bytes"] < 256 << 20
    streams.pop().close()
    streams.append(port.open(doorbell))  # in the buffers of the last one
    assert port.counters["streams"] == most
    for stream in streams:
        stream.close()


def refuses(rank: int, size: int, folder: str) -> str:
    group: Communicator = join(rank, size, folder, "tcp", algorithm="ring")
    port = port_of("tcp", LOOPBACK)
    full: list[Any] = []
    while rank == 1 and len(full) < port.counters["max_streams"]:
        full.append(port.open(fabric.make_doorbell()))
    is_full = Path(folder, "full")
    if rank == 1:
        is_full.touch()
    assert settles(is_full.exists)
    began = time.monotonic()
    try:
        group.all_reduce(np.ones(10))
    except NetfoldError as error:
        assert time.monotonic() - began < 20
        # A rank that ended could not tell a slower one, which has no connection to it yet, why.
        await_all("failed", rank, size, folder)
        return f"{type(error).__name__} {error.rank}: {error}"
    finally:
        group.close()
        for stream in full:
            stream.close()
    return "nothing went wrong"


def test_a_rank_beyond_the_bound_is_the_verdict_of_every_rank() -> None:
    for said in values(run_ranks(refuses, 4)):
        assert "1024 streams over provider tcp" in said, said
