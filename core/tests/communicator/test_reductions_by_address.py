"""Reductions and broadcasts of long tensors among ranks that read and write each other's memory."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from load import seconds
from ranks import hide_memory, run_ranks, run_threads, values

import netfold
from netfold import Communicator, FileStore, Options
from netfold.communicator import CollectiveTimeout, PeerLost

pytestmark = pytest.mark.native

PATIENCE_S = 150.0
MB = 1 << 20
FLOATS = ("float32", "float64", "float16", "bfloat16")
INTEGERS = ("int8", "int32", "uint16", "int64")


def join(rank: int, size: int, folder: str, name: str = "", **options: Any) -> Communicator:
    return Communicator(FileStore(folder + name), rank, size, options=Options(**options), timeout_s=20)


@functools.lru_cache(maxsize=128)
def _random(dtype: str, count: int, *seed: int) -> Any:
    """Finite values of any size, whose sums depend on the order of summation."""
    generator = np.random.default_rng(seed)
    if dtype in FLOATS:
        kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
        return (generator.standard_normal(count) * 2.0 ** generator.integers(-5, 5, count)).astype(kind)
    return np.frombuffer(generator.bytes(count * np.dtype(dtype).itemsize), dtype).copy()


def random(dtype: str, count: int, *seed: int) -> Any:
    return _random(dtype, count, *seed).copy()


def bits(array: Any) -> bytes:
    return bytes(array.view(np.uint8))


def reduced(group: Communicator, operation: str, dtype: str, op: str, bytes_: int, offset: int = 0) -> bytes:
    """The bits of this rank's tensor or block after the operation. `bytes_`: of the tensor, or of all blocks."""
    rank, size = group.rank, group.size
    width = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
    count = bytes_ // width + 19
    if operation == "reduce_scatter":
        inputs = [random(dtype, count // size + 11 * to, rank, to)[offset:] for to in range(size)]
        into = np.zeros_like(inputs[rank])
        group.reduce_scatter(inputs, into, op=op)
        assert all(
            bits(given) == bits(random(dtype, count // size + 11 * to, rank, to)[offset:])
            for to, given in enumerate(inputs)
        )
        return bits(into)
    tensor = random(dtype, count, rank)
    part = tensor[offset:]
    if operation == "broadcast":
        group.broadcast(part, min(1, size - 1))
    elif operation == "all_reduce":
        group.all_reduce(part, op=op)
    else:
        group.reduce(part, min(1, size - 1), op=op)
    assert bits(tensor[:offset]) == bits(random(dtype, count, rank)[:offset])
    return bits(part)


def both_ways(rank: int, size: int, folder: str, cases: list[tuple[Any, ...]]) -> list[bytes]:
    got = []
    with join(rank, size, folder, "/on") as on, join(rank, size, folder, "/off", single_copy="off") as off:
        memory = on.group.peer_memory
        assert off.group.peer_memory is None
        for case in cases:
            before = memory.bytes_read
            got.append(reduced(on, *case))
            assert memory.bytes_read > before + case[3] // size // 2, case
            assert got[-1] == reduced(off, *case), case
    return got


def run_both_ways(size: int, cases: list[tuple[Any, ...]]) -> list[list[bytes]]:
    def run(rank: int, size: int, folder: str) -> list[bytes]:
        for name in ("on", "off"):
            Path(folder, name).mkdir(exist_ok=True)
        return both_ways(rank, size, folder, cases)

    got: list[list[bytes]] = values(run_threads(run, size, timeout_s=PATIENCE_S))
    return got


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("operation", ["all_reduce", "reduce", "reduce_scatter"])
def test_every_dtype_and_operator_gives_the_bits_that_slots_give(operation: str, size: int) -> None:
    bytes_ = 8 * MB if operation == "reduce_scatter" else 4 * MB
    cases = [(operation, dtype, op, bytes_) for dtype in FLOATS for op in ("sum", "avg")]
    cases += [(operation, dtype, op, bytes_) for dtype in INTEGERS for op in ("sum", "min")]
    run_both_ways(size, cases)


@pytest.mark.parametrize("size", [2, 4, 7])
def test_all_ranks_get_the_same_bits_at_any_size_and_alignment(size: int) -> None:
    cases = [
        ("all_reduce", "float32", "sum", bytes_, offset)
        for bytes_ in (4 * MB, 4 * MB + 4 * 4099, 5 * MB - 4)
        for offset in (0, 13)
    ]
    first, *others = run_both_ways(size, cases)
    assert all(got == first for got in others)


def broadcasts(rank: int, size: int, folder: str, bytes_: int) -> None:
    with join(rank, size, folder) as group:
        memory = group.group.peer_memory
        for root, offset, shared in ((0, 0, -1), (1, 13, -1), (size - 1, 3, -1), (0, 1, 0), (0, 1, 1), (1, 0, 1)):
            count = bytes_ // 4 + 4099
            tensor = netfold.empty(count) if rank == shared else np.empty(count, np.float32)
            tensor[:] = random("float32", count, rank)
            before = memory.bytes_read
            group.broadcast(tensor[offset:], root)
            assert bits(tensor[:offset]) == bits(random("float32", count, rank)[:offset])
            assert bits(tensor[offset:]) == bits(random("float32", count, root)[offset:]), (root, offset, shared)
            # Each part of the root's buffer is read by one rank. Before it writes, a rank reads one byte.
            is_mapped = shared == root or rank == root
            assert (memory.bytes_read - before) * size // (0.9 * bytes_) == (0 if is_mapped else 1)


@pytest.mark.parametrize("bytes_", [4 * MB, 32 * MB])
def test_a_large_broadcast_is_shared_out_between_two_ranks(bytes_: int) -> None:
    values(run_threads(broadcasts, 2, bytes_, timeout_s=PATIENCE_S))


def mixed(rank: int, size: int, folder: str) -> None:
    """Some tensors lie in shared memory, which is mapped, and the rest are read by address."""
    with join(rank, size, folder) as group:
        for operation, root in (("all_reduce", 0), *(("reduce", root) for root in range(size))):
            for shared in range(size):
                count = 1_200_001
                tensor = netfold.empty(count) if rank == shared else np.empty(count, np.float32)
                tensor[:] = random("float32", count, rank)
                expected = random("float32", count, 0)
                for other in range(1, size):
                    expected += random("float32", count, other)
                if operation == "all_reduce":
                    group.all_reduce(tensor)
                else:
                    group.reduce(tensor, root)
                if operation == "reduce" and rank != root:
                    expected = random("float32", count, rank)
                assert bits(tensor) == bits(expected), (operation, root, shared)


def test_mapped_tensors_and_tensors_that_are_read_by_address_mix() -> None:
    values(run_threads(mixed, 3, timeout_s=PATIENCE_S))


def in_place_scatter(rank: int, size: int, folder: str) -> None:
    """The output is this rank's own input block."""
    with join(rank, size, folder) as group:
        count = 9 * MB // 4 // size
        whole = random("float32", count * size, rank)
        blocks = [whole[count * to : count * (to + 1)] for to in range(size)]
        group.reduce_scatter(blocks, blocks[rank])
        expected = random("float32", count * size, 0)
        for other in range(1, size):
            expected += random("float32", count * size, other)
        assert bits(blocks[rank]) == bits(expected[count * rank : count * (rank + 1)])


@pytest.mark.parametrize("size", [2, 3])
def test_a_reduce_scatter_may_write_into_its_own_input(size: int) -> None:
    values(run_threads(in_place_scatter, size, timeout_s=PATIENCE_S))


def hidden_later(rank: int, size: int, folder: str) -> int:
    with join(rank, size, folder) as group:
        group.barrier()
        hide_memory(rank)
        group.barrier()
        for _ in range(2):
            for operation in ("all_reduce", "reduce", "reduce_scatter"):
                reduced(group, operation, "float32", "sum", 9 * MB)
            tensor = np.full(8 * MB, rank, np.float32)
            group.all_reduce(tensor)
            assert (tensor == size * (size - 1) / 2).all()
            tensor[:] = rank
            group.broadcast(tensor, 0)
            assert (tensor == 0).all()
        return int(group.group.peer_memory.bytes_read)


def test_tensors_that_cannot_be_read_go_through_slots() -> None:
    # Two bytes at most of each tensor are read to find out.
    assert max(values(run_ranks(hidden_later, 3, timeout_s=PATIENCE_S))) < 100


def dies(rank: int, size: int, folder: str, operation: str, victim: int) -> Any:
    with join(rank, size, folder) as group:
        group.barrier()
        if rank == victim:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        expected = None
        try:
            while True:
                got = reduced(group, operation, "float32", "sum", 33 * MB if operation == "broadcast" else 9 * MB)
                assert expected in (None, got)  # checks the data of finished calls
                expected = got
        except PeerLost as error:
            return error.rank, str(error)


@pytest.mark.parametrize("operation", ["all_reduce", "reduce", "reduce_scatter", "broadcast"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_killed_during_a_call_is_named(operation: str, victim: int) -> None:
    began = time.monotonic()
    for rank, outcome in enumerate(run_ranks(dies, 3, operation, victim, dies=[victim])):
        if rank == victim:
            continue
        assert not outcome.error, outcome.text
        named, text = outcome.value
        assert named == victim, f"rank {rank}: {text}"
    assert time.monotonic() - began < seconds(30.0)


def late(rank: int, size: int, folder: str) -> str:
    """Rank 2 calls after the other ranks' timeout, when they have got their tensors back and written to them."""
    with join(rank, size, folder) as group:
        group.barrier()
        flags = [Path(folder, f"back{other}") for other in (0, 1)]
        tensor = np.ones(4 * MB, np.float32)
        if rank == 2:
            until = time.monotonic() + seconds(15)
            while not all(flag.exists() for flag in flags) and time.monotonic() < until:
                time.sleep(0.01)
            with pytest.raises(PeerLost) as failure:
                group.all_reduce(tensor)
            return str(failure.value)
        with pytest.raises((CollectiveTimeout, PeerLost)) as given_up:
            group.all_reduce(tensor, timeout_s=1.0)
        tensor[:] = 77
        flags[rank].touch()
        time.sleep(1.0)
        assert (tensor == 77).all()
        return str(given_up.value)


def test_no_tensor_of_a_rank_that_gave_up_is_read_or_written() -> None:
    texts = values(run_ranks(late, 3, timeout_s=PATIENCE_S))
    assert "rank 2" in texts[0] and "rank 2" in texts[1]
    assert "gave up on the group" in texts[2]


def stopped(rank: int, size: int, folder: str) -> str:
    """Rank 1 is stopped during an all_reduce, for longer than the other ranks' timeout."""
    with join(rank, size, folder) as group:
        tensor = np.ones(16 * MB, np.float32)
        group.barrier()
        if rank == 1:
            pid = os.getpid()
            if os.fork() == 0:
                time.sleep(0.2)
                os.kill(pid, signal.SIGSTOP)
                time.sleep(4.0)
                os.kill(pid, signal.SIGCONT)
                os._exit(0)
        try:
            while True:
                group.all_reduce(tensor, op="max", timeout_s=2.0)
                assert (tensor == 1).all()
        except (CollectiveTimeout, PeerLost) as error:
            before = tensor.copy()
            time.sleep(3.0)
            assert "stopped while it reads or writes" in str(error) or bits(before) == bits(tensor)
            return str(error)


def test_a_rank_stopped_in_a_reduction_times_out_and_touches_no_memory_afterwards() -> None:
    texts = values(run_ranks(stopped, 3, timeout_s=PATIENCE_S))
    assert "rank 1" in texts[0] and "rank 1" in texts[2]
