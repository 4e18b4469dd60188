"""Messages through the rings that ranks of one machine share: wrap-around, full rings, deaths, mixed transports.

Tests for every transport: test_point_to_point.py.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
from load import seconds
from ranks import run_ranks, run_threads, values

from netfold import Communicator, FileStore, Options
from netfold.communicator import PeerLost
from netfold.communicator.group import ANY_SOURCE, region

native = pytest.mark.native

# netfold/transport/shm/shm_node.hpp, shm_pipe.hpp, netfold/collective/point_to_point.hpp
RING_BYTES = 1 << 20
STEP_BYTES = 16 << 10
HEADER_BYTES = 32
EAGER_BYTES = 128 << 10
TIMEOUT_S = 20.0
# The kernel wakes a sleeping rank at a death, so the error comes long before TIMEOUT_S.
AT_ONCE_S = 2.0


def join(rank: int, size: int, folder: str, transport: str = "auto", spin_us: int | None = None) -> Communicator:
    options = Options(transport=transport, spin_us=spin_us)
    return Communicator(FileStore(folder), rank, size, options=options, timeout_s=seconds(TIMEOUT_S), join_timeout_s=20)


def message(size_bytes: int, sender: int, number: int) -> Any:
    """Values with a prime period, so that a shift by a step, a page or the ring shows."""
    return ((np.arange(size_bytes, dtype=np.uint32) + 31 * sender + 7 * number) % 251).astype(np.uint8)


def start(group: Communicator, kind: str, buffer: Any, peer: int, tag: int = 0) -> Any:
    ours = [region(buffer)]
    return group.group.submit(
        kind,
        root=peer,
        tag=tag,
        inputs=ours if kind == "send" else (),
        outputs=ours if kind == "receive" else (),
        wait_here=False,
    )


def sends(rank: int, size: int, folder: str, sizes: list[int]) -> None:
    with join(rank, size, folder) as group:
        for number, size_bytes in enumerate(sizes):
            if rank == 0:
                group.send(message(size_bytes, 0, number), 1)
            else:
                into = np.zeros(size_bytes, np.uint8)
                group.receive(into, 0)
                np.testing.assert_array_equal(into, message(size_bytes, 0, number))


@native
@pytest.mark.parametrize("border", [STEP_BYTES, EAGER_BYTES, RING_BYTES, 2 * RING_BYTES])
def test_sizes_around_every_threshold_arrive_whole(border: int) -> None:
    near = [border + offset for offset in (-HEADER_BYTES - 1, -HEADER_BYTES, -HEADER_BYTES + 1, -1, 0, 1, HEADER_BYTES)]
    values(run_threads(sends, 2, near * 3))


@native
def test_headers_and_values_may_wrap_around_the_ring_anywhere() -> None:
    """With each lap, the ring's end is 8 bytes earlier in a message."""
    size_bytes = RING_BYTES // 16 - HEADER_BYTES - 1
    values(run_threads(sends, 2, [size_bytes] * 16 * 40))


def both_full(rank: int, size: int, folder: str, size_bytes: int, count: int) -> None:
    with join(rank, size, folder) as group:
        sent = [message(size_bytes, rank, number) for number in range(count)]
        got = [np.zeros(size_bytes, np.uint8) for _ in range(count)]
        work = [start(group, "send", buffer, 1 - rank) for buffer in sent]
        group.barrier()  # no rank receives until both rings are full
        for buffer in got:
            group.receive(buffer, 1 - rank)
        for operation in work:
            group.group.wait(operation)
        for number, buffer in enumerate(got):
            np.testing.assert_array_equal(buffer, message(size_bytes, 1 - rank, number))


@native
@pytest.mark.parametrize(("size_bytes", "count"), [(0, 20_000), (100, 6000), (5000, 800), (EAGER_BYTES, 40)])
def test_many_messages_in_both_directions_with_full_rings(size_bytes: int, count: int) -> None:
    values(run_threads(both_full, 2, size_bytes, count))


def leaves_its_credit(rank: int, size: int, folder: str) -> None:
    sizes = [EAGER_BYTES] * 7 + [1000] * 50
    with join(rank, size, folder) as group:
        for number, size_bytes in enumerate(sizes):
            group.send(message(size_bytes, rank, number), 1 - rank)
        group.barrier()  # its algorithm reads no message
        for number, size_bytes in enumerate(sizes):
            into = np.zeros(size_bytes, np.uint8)
            group.receive(into, 1 - rank)
            np.testing.assert_array_equal(into, message(size_bytes, 1 - rank, number))


@native
def test_a_sender_within_its_credit_does_not_wait() -> None:
    values(run_threads(leaves_its_credit, 2))


def unread_at_the_end(rank: int, size: int, folder: str, left: threading.Event) -> None:
    group = join(rank, size, folder)
    if rank == 0:
        for number in range(6):
            group.send(message(EAGER_BYTES, 0, number), 1)
        group.close()
        left.set()
        return
    with group:
        assert left.wait(TIMEOUT_S)
        for number in range(3):
            into = np.zeros(EAGER_BYTES, np.uint8)
            group.receive(into, 0)
            np.testing.assert_array_equal(into, message(EAGER_BYTES, 0, number))
        with pytest.raises(PeerLost, match="rank 0 left: rank 0 closed the group"):
            group.receive(np.zeros(1, np.uint8), 0, tag=5)


@native
def test_unread_messages_block_no_rank_and_outlive_their_sender() -> None:
    values(run_threads(unread_at_the_end, 2, threading.Event()))


def mixes(rank: int, size: int, folder: str, apart: set[int]) -> None:
    with join(rank, size, folder, "tcp" if rank in apart else "auto") as group:
        peers = [peer for peer in range(size) if peer != rank]
        for size_bytes in (0, 100, EAGER_BYTES + 1, 2 * RING_BYTES + 3):
            sent = {peer: message(size_bytes, rank, peer) for peer in peers}
            got = {peer: np.zeros(size_bytes, np.uint8) for peer in peers}
            work = [start(group, "receive", got[peer], peer, rank) for peer in peers]
            work += [start(group, "send", sent[peer], peer, peer) for peer in peers]
            for operation in work:
                group.group.wait(operation)
            for peer in peers:
                np.testing.assert_array_equal(got[peer], message(size_bytes, peer, rank))
        # The first message, through memory or a connection.
        into = np.zeros(8, np.uint8)
        if rank == 0:
            assert {group.receive(into) for _ in peers} == set(peers)
        else:
            time.sleep(0.05 * rank)
            group.send(into, 0)


@native
@pytest.mark.parametrize("apart", [set(), {0}, {1}, {2, 3}])
def test_ranks_that_share_memory_and_ranks_that_do_not_exchange_in_one_group(apart: set[int]) -> None:
    values(run_threads(mixes, 4, apart))


def sleeps_while_rank_1_dies(rank: int, size: int, folder: str, call: str) -> tuple[float, str]:
    group = join(rank, size, folder)
    group.barrier()
    large = np.zeros(64 << 20, np.uint8)
    if rank == 1:
        threading.Timer(0.3, _die, (folder,)).start()
        if call == "receive in the middle":
            # Longer than the data that comes: rank 0 reads a part.
            work = [start(group, "send", large, 0) for _ in range(50)]
            for operation in work:
                group.group.wait(operation)
        if call == "send in the middle":
            for _ in range(1000):
                group.receive(large, 0)
        time.sleep(20)
    try:
        while True:
            if call.startswith("send"):
                group.send(large, 1)
            elif call == "receive from any":
                group.receive(large)
            else:
                group.receive(large, 1)
    except PeerLost as error:
        noticed = time.monotonic()
        return noticed - _dead(folder), f"{error.rank}"
    finally:
        group.close()


def plays_and_streams(rank: int, size: int, folder: str) -> None:
    with join(rank, size, folder, spin_us=0) as group:
        for number in range(1000):
            buffer = message(64, 0, number) if rank == 0 else np.zeros(64, np.uint8)
            for turn in range(2):
                if turn == rank:
                    group.send(buffer, 1 - rank)
                else:
                    group.receive(buffer, 1 - rank)
            np.testing.assert_array_equal(buffer, message(64, 0, number))
        for number in range(10):
            large = message(8 * RING_BYTES + 5, 0, number)
            if rank == 0:
                group.send(large, 1)
            else:
                into = np.zeros_like(large)
                group.receive(into, 0)
                np.testing.assert_array_equal(into, large)


@native
def test_a_rank_that_sleeps_at_once_is_woken_for_bytes_and_for_space() -> None:
    values(run_threads(plays_and_streams, 2))


def is_stopped_in_the_middle(rank: int, size: int, folder: str) -> None:
    size_bytes = 4 * RING_BYTES
    with join(rank, size, folder) as group:
        if rank == 1:
            group.send(np.array([os.getpid()], np.int64), 0)
            for number in range(9):
                group.send(message(size_bytes, 1, number), 0)
            return
        pid = np.zeros(1, np.int64)
        group.receive(pid, 1)
        into = np.zeros(size_bytes, np.uint8)
        for number in range(9):
            if number % 3 == 1:
                os.kill(int(pid[0]), signal.SIGSTOP)
                threading.Timer(0.2, os.kill, (int(pid[0]), signal.SIGCONT)).start()
            group.receive(into, 1)
            np.testing.assert_array_equal(into, message(size_bytes, 1, number))


def test_a_stopped_rank_continues_after_sigcont() -> None:
    values(run_ranks(is_stopped_in_the_middle, 2))


def _die(folder: str) -> None:
    with open(f"{folder}/died", "w") as file:
        file.write(f"{time.monotonic()!r} {os.getpid()}")
    os.kill(os.getpid(), signal.SIGKILL)


def _dead(folder: str) -> float:
    """Wait until the process that `_die` kills is gone. Returns the time of the kill."""
    while True:
        with contextlib.suppress(FileNotFoundError, ValueError):  # the file is not there yet, or being written
            with open(f"{folder}/died") as file:
                died_s, pid = file.read().split()
            if _has_ended(pid):
                return float(died_s)
        time.sleep(0.01)


def _has_ended(pid: str) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("call", ["receive", "receive from any", "send", "receive in the middle", "send in the middle"])
def test_a_killed_rank_is_noticed_at_once(call: str) -> None:
    outcomes = run_ranks(sleeps_while_rank_1_dies, 2, call, dies=[1])
    assert not outcomes[0].error, outcomes[0].text
    took_s, lost = outcomes[0].value
    assert lost == "1"
    assert took_s < seconds(AT_ONCE_S)


FLOOD = 100_000


def floods_the_dead(rank: int, size: int, folder: str) -> int:
    group = join(rank, size, folder)
    group.barrier()
    if rank == 1:
        _die(folder)
    _dead(folder)
    sent = 0
    try:
        while sent < FLOOD:
            group.send(np.zeros(8, np.uint8), 1)
            sent += 1
    except PeerLost as error:
        assert error.rank == 1
    finally:
        group.close()
    return sent


def test_a_rank_that_only_sends_small_messages_notices_a_death() -> None:
    outcomes = run_ranks(floods_the_dead, 2, dies=[1])
    assert not outcomes[0].error, outcomes[0].text
    assert outcomes[0].value < FLOOD


def sleeps(rank: int, size: int, folder: str) -> float:
    """CPU seconds of a wait of 1 s."""
    with join(rank, size, folder) as group:
        into = np.zeros(4, np.uint8)
        if rank == 1:
            group.barrier()
            time.sleep(1)
            group.send(into, 0)
            return 0.0
        group.barrier()
        before = resource.getrusage(resource.RUSAGE_SELF)
        assert group.receive(into, ANY_SOURCE) == 1
        after = resource.getrusage(resource.RUSAGE_SELF)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_waiting_for_a_message_takes_no_cpu() -> None:
    assert values(run_ranks(sleeps, 2))[0] < 0.1
