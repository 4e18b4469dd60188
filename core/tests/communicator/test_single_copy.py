"""Ranks of one machine that read data from each other's memory, and ranks that may not."""

from __future__ import annotations

import functools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from load import seconds
from ranks import hide_memory, run_ranks, run_threads, values

from netfold import Communicator, FileStore, Options
from netfold._native import engine
from netfold.communicator import PeerLost

pytestmark = pytest.mark.native

SOON_S = 3.0
# For much data under a sanitizer, on a busy machine.
PATIENCE_S = 150.0
OPERATIONS = ("broadcast", "all_gather", "gather", "scatter", "all_to_all")
# Bytes for one rank: around a post, the least that is exported to several, and a chunk.
BYTES = (
    0,
    1,
    (16 << 10) - 64,
    16 << 10,
    (16 << 10) + 8,
    300_000,
    (512 << 10) - 1,
    512 << 10,
    (1 << 20) + 4099,
    3 << 20,
)


def join(rank: int, size: int, folder: str, **options: Any) -> Communicator:
    return Communicator(FileStore(folder), rank, size, options=Options(**options), timeout_s=20, join_timeout_s=20)


@functools.lru_cache(maxsize=64)
def _pattern(seed: int, count: int) -> Any:
    """Random bytes, which have no period that could hide a misplaced chunk."""
    return np.frombuffer(np.random.default_rng(seed).bytes(count), np.uint8)


def block(source: int, reader: int, count: int, seed: int = 0) -> Any:
    return _pattern(31 * seed + 5 * source + reader, count).copy()


def call(group: Communicator, operation: str, bytes_: int, *, uneven: int = 0, seed: int = 0) -> None:
    """Run and check one operation, with root 0 or 1. Rank a sends bytes_ + uneven * (a + 2 * b) to b."""
    rank, size, root = group.rank, group.size, min(1, group.size - 1)

    def sent(source: int, reader: int) -> int:
        return bytes_ + uneven * (source + 2 * reader)

    def same(got: Any, source: int, reader: int) -> None:
        assert np.array_equal(got, block(source, reader, sent(source, reader), seed)), (source, reader)

    if operation == "broadcast":
        buffer = block(rank, 0, bytes_, seed)
        group.broadcast(buffer, root)
        assert np.array_equal(buffer, block(root, 0, bytes_, seed))
    elif operation in ("all_gather", "gather"):
        into = [np.zeros(sent(other, 0), np.uint8) for other in range(size)]
        into[rank][:] = block(rank, 0, sent(rank, 0), seed)  # in place
        if operation == "all_gather":
            group.all_gather(into[rank], into)
        else:
            group.gather(into[rank], into if rank == root else None, root)
        if operation == "all_gather" or rank == root:
            for other in range(size):
                same(into[other], other, 0)
    elif operation == "scatter":
        got = np.zeros(sent(root, rank), np.uint8)
        group.scatter([block(root, r, sent(root, r), seed) for r in range(size)] if rank == root else None, got, root)
        same(got, root, rank)
    else:
        into = [np.zeros(sent(other, rank), np.uint8) for other in range(size)]
        group.all_to_all([block(rank, reader, sent(rank, reader), seed) for reader in range(size)], into)
        for other in range(size):
            same(into[other], other, rank)


def long_ones(rank: int, size: int, folder: str, single_copy: str) -> None:
    with join(rank, size, folder, single_copy=single_copy) as group:
        for operation in OPERATIONS:
            call(group, operation, (33 << 20) + 5 if operation == "broadcast" else (33 << 20) // size + 4099, uneven=3)


@pytest.mark.parametrize("single_copy", ["on", "off"])
@pytest.mark.parametrize("size", [2, 3])
def test_long_copies_bypass_the_caches_to_the_last_byte(size: int, single_copy: str) -> None:
    values(run_threads(long_ones, size, single_copy, timeout_s=PATIENCE_S))


def every_operation(rank: int, size: int, folder: str, single_copy: str) -> tuple[int | None, str]:
    with join(rank, size, folder, single_copy=single_copy) as group:
        for operation in OPERATIONS:
            for bytes_ in BYTES:
                call(group, operation, bytes_)
            call(group, operation, 200_001, uneven=70_001)
            call(group, operation, 0, uneven=1_000_003)
        memory = group.group.peer_memory
        return memory and memory.bytes_read, group.group.why("all_to_all", 1 << 20)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_operation_moves_every_byte_in_one_copy(size: int) -> None:
    for bytes_read, why in values(run_threads(every_operation, size, "on", timeout_s=PATIENCE_S)):
        assert bytes_read is not None and bytes_read > 4 << 20
        assert "one copy, each rank reads the others' memory" in why


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_operation_moves_every_byte_through_slots(size: int) -> None:
    for bytes_read, why in values(run_threads(every_operation, size, "off", timeout_s=PATIENCE_S)):
        assert bytes_read is None
        assert "two copies through slots, since rank 0 has NETFOLD_SINGLE_COPY=off" in why


def what_is_read(rank: int, size: int, folder: str, operation: str, bytes_: int) -> int:
    with join(rank, size, folder) as group:
        call(group, operation, bytes_)
        return int(group.group.peer_memory.bytes_read)


@pytest.mark.parametrize(
    ("operation", "size", "bytes_", "expected"),
    [
        ("all_to_all", 2, 20_000, [20_000, 20_000]),
        ("all_to_all", 3, 100_000, [200_000] * 3),
        ("all_to_all", 3, 5_000, [0] * 3),  # in posts
        ("all_gather", 2, 20_000, [20_000, 20_000]),
        ("all_gather", 3, (512 << 10) - 1, [0] * 3),
        ("all_gather", 3, 512 << 10, [1 << 20] * 3),
        ("gather", 3, 512 << 10, [0, 1 << 20, 0]),
        ("scatter", 3, 512 << 10, [512 << 10, 0, 512 << 10]),
        ("broadcast", 2, 100_000, [100_000, 0]),
        ("broadcast", 2, 512 << 10, [0, 0]),  # owner and reader share the work
        ("broadcast", 3, 1 << 20, [0, 0, 0]),
    ],
)
def test_single_copy_is_chosen_where_it_is_faster(operation: str, size: int, bytes_: int, expected: list[int]) -> None:
    assert values(run_threads(what_is_read, size, operation, bytes_)) == expected


def off_on_one(rank: int, size: int, folder: str) -> tuple[bool, str]:
    with join(rank, size, folder, single_copy="off" if rank == 2 else "on") as group:
        call(group, "all_to_all", 1 << 20)
        return group.group.peer_memory is None, group.group.why("all_to_all", 1 << 20)


def test_single_copy_disabled_on_one_rank_is_disabled_for_all_and_the_log_names_that_rank() -> None:
    for without, why in values(run_threads(off_on_one, 3)):
        assert without and "since rank 2 has NETFOLD_SINGLE_COPY=off" in why


def hidden_before(rank: int, size: int, folder: str) -> tuple[bool, str, list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("netfold").addHandler(handler)
    logging.getLogger("netfold").setLevel("DEBUG")
    hide_memory(rank)
    with join(rank, size, folder) as group:
        for operation in OPERATIONS:
            call(group, operation, 1 << 20)
        return group.group.peer_memory is None, group.group.why("all_to_all", 1 << 20), said


def test_ranks_that_may_not_read_each_other_say_so_and_use_slots() -> None:
    reason = "two copies through slots, since rank 1 cannot read the memory of rank 0: Operation not permitted"
    for rank, (without, why, said) in enumerate(values(run_ranks(hidden_before, 3))):
        assert without and reason in why
        assert f"rank {rank} of 3: {reason}" in said


def hidden_later(rank: int, size: int, folder: str) -> int:
    with join(rank, size, folder) as group:
        group.barrier()
        hide_memory(rank)
        group.barrier()
        for seed in range(3):
            for operation in OPERATIONS:
                call(group, operation, 5 << 20, seed=seed)
        return int(group.group.peer_memory.bytes_read)


def test_an_unreadable_buffer_goes_through_slots() -> None:
    """Like device memory, or memory of a rank whose permissions have changed."""
    read = values(run_ranks(hidden_later, 3))
    # all_to_all and all_gather read from both others, scatter from rank 1. Ranks that may not read rank 0 read from one
    # rank, and rank 1 gathers from rank 2.
    assert read == [3 * (5 << 20) * (2 + 2 + 1), 3 * (5 << 20) * 3, 3 * (5 << 20) * 3]


def leaves_first(rank: int, size: int, folder: str, operation: str, single_copy: str) -> None:
    """Rank 1 finishes and leaves. Rank 2 calls half a second later, and rank 0 must not report rank 1 as lost."""
    count = 6 << 20  # more than slots hold
    group = join(rank, size, folder, single_copy=single_copy)
    group.barrier()
    if rank == 2:
        time.sleep(0.5)
    if operation == "scatter":
        blocks = [np.full(count, other, np.uint8) for other in range(size)] if rank == 0 else None
        got = np.zeros(count if rank else 8, np.uint8)
        if rank == 0:
            assert blocks is not None
            blocks[0] = blocks[0][:8]
        group.scatter(blocks, got, 0)
        assert (got == rank).all()
    else:
        # The root reads rank 1's few bytes at once and rank 2's later; rank 0 exports much to the last one.
        mine = np.full(count if rank == 0 else 8, rank, np.uint8)
        into = [np.zeros(count if source == 0 else 8, np.uint8) for source in range(size)] if rank == 2 else None
        group.gather(mine, into, 2)
        if into is not None:
            assert all((each == source).all() for source, each in enumerate(into))
    group.close()


@pytest.mark.parametrize("single_copy", ["on", "off"])
@pytest.mark.parametrize("operation", ["scatter", "gather"])
def test_a_finished_rank_may_leave_while_others_still_read(operation: str, single_copy: str) -> None:
    values(run_threads(leaves_first, 3, operation, single_copy))


def dies(rank: int, size: int, folder: str, operation: str, victim: int) -> Any:
    with join(rank, size, folder) as group:
        group.barrier()
        if rank == victim:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
        seed = 0
        try:
            while True:
                call(group, operation, 4 << 20, seed=seed)  # checks the data of finished calls
                seed += 1
        except PeerLost as error:
            return error.rank, str(error), seed, group.group.peer_memory.bytes_read


@pytest.mark.parametrize("operation", ["all_to_all", "all_gather", "gather", "scatter", "broadcast"])
@pytest.mark.parametrize("victim", [1, 2])
def test_a_rank_killed_during_a_read_is_named_and_no_wrong_data_kept(operation: str, victim: int) -> None:
    """Rank 1 is the root: in a scatter it exports memory, in a gather it reads."""
    began = time.monotonic()
    for rank, outcome in enumerate(run_ranks(dies, 3, operation, victim, dies=[victim])):
        if rank == victim:
            continue
        assert not outcome.error, outcome.text
        named, text, _, _ = outcome.value
        assert named == victim, f"rank {rank}: {text}"
    assert time.monotonic() - began < seconds(20.0)


def gives_up(rank: int, size: int, folder: str) -> str:
    """Rank 0 exports its buffers, aborts, and writes to them; rank 1 calls after that."""
    group = join(rank, size, folder)
    flag = Path(folder, "aborted")
    try:
        if rank == 0:
            parts = [np.ones(1 << 20, np.uint8) for _ in range(size)]
            work = group.scatter(parts, np.zeros(1 << 20, np.uint8), 0, asynchronous=True)
            time.sleep(0.2)
            group.group.abort("a test")
            with pytest.raises(Exception, match="a test"):
                work.wait(seconds(10))
            for part in parts:
                part[:] = 77
            flag.touch()
            return ""
        until = time.monotonic() + seconds(10)
        while not flag.exists() and time.monotonic() < until:
            time.sleep(0.01)
        into = np.zeros(1 << 20, np.uint8)
        with pytest.raises(PeerLost, match="a test") as failure:
            group.scatter(None, into, 0)
        return str(failure.value)
    finally:
        group.close()


def test_no_memory_of_a_failed_rank_is_read() -> None:
    assert "rank 0 gave up on the group" in values(run_threads(gives_up, 2))[1]


CHILD = """
import sys
from netfold._native import engine
memory = engine.PeerMemory(2)
print(memory.address, memory.mark.hex(), flush=True)
sys.stdin.read()
"""


def test_a_process_is_identified_by_its_mark_and_not_its_pid() -> None:
    memory = engine.PeerMemory(2)
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        address, mark = child.stdout.readline().split()
        assert memory.probe(1, child.pid, int(address), bytes.fromhex(mark)) == ""
        other = bytes(16)
        assert memory.probe(1, child.pid, int(address), other) == "another process has its number here"
        assert memory.probe(1, child.pid, 4096, bytes.fromhex(mark)) == "Bad address"
        child.stdin.close()
        child.wait()
        assert memory.probe(1, child.pid, int(address), bytes.fromhex(mark)) == "No such process"


def test_a_forked_child_does_not_have_its_parents_mark() -> None:
    memory = engine.PeerMemory(1)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        assert memory.probe(0, child, memory.address, memory.mark) == "another process has its number here"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
