"""The registration cache: hits, bounds, and that no entry outlives its memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from typing import Any

import numpy as np
import pytest
from ranks import run_threads, values
from test_fabric import LOOPBACK, join

from netfold import Communicator
from netfold._native import fabric
from netfold.bootstrap.fabric import port_of

# Elements of a bucket: 1 MB, sent in four large chunks over two ranks.
COUNT = 1 << 18
STRICT = "strict:seed=11+tcp"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FIXED_NOREPLACE = 0x100000


def ring(rank: int, size: int, folder: str, provider: str, **options: Any) -> Communicator:
    return join(rank, size, folder, provider, algorithm="ring", rma_min_bytes=32 << 10, **options)


def pages(address: int | None = None) -> np.ndarray:
    """A bucket in its own pages, at `address` where one is given."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_MAP_FIXED_NOREPLACE if address else 0)
    got = _libc.mmap(address, COUNT * 4, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    assert got not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
    assert address in (None, got)
    return np.frombuffer((ctypes.c_float * COUNT).from_address(got), np.float32)


def unmap(bucket: np.ndarray) -> None:
    assert _libc.munmap(bucket.ctypes.data, bucket.nbytes) == 0


def check_sum(group: Communicator, bucket: np.ndarray, scale: int) -> None:
    """Sum a bucket, with other contents on every rank each time."""
    bucket[:] = np.arange(bucket.size) % 1000 + scale * (group.rank + 1)
    group.all_reduce(bucket)
    ranks = group.size
    expected = np.arange(bucket.size) % 1000 * ranks + scale * ranks * (ranks + 1) // 2
    np.testing.assert_array_equal(bucket, expected)


def outcomes(group: Communicator) -> list[tuple[int, int]]:
    """Registration hits and misses, by operation."""
    records = group.group.events()
    return list(zip(records["registration_hits"].tolist(), records["registration_misses"].tolist(), strict=True))


def buckets(rank: int, size: int, folder: str, provider: str) -> list[tuple[int, int]]:
    with ring(rank, size, folder, provider) as group:
        bucket, other = np.zeros(COUNT, np.float32), np.zeros(COUNT, np.float32)
        with group.register(bucket):
            check_sum(group, bucket, 1)
            check_sum(group, bucket, 2)
            check_sum(group, bucket[COUNT // 2 :], 3)
            check_sum(group, other, 4)
            check_sum(group, other, 5)
        check_sum(group, bucket, 6)
        counters = group.group.fabric_counters()
        assert counters is not None and counters["writes"] >= 6
        return outcomes(group)


@pytest.mark.parametrize("provider", ["tcp", STRICT])
def test_a_bucket_is_registered_once_and_only_its_parts_are_hits(provider: str) -> None:
    hit, missed = (1, 0), (0, 1)
    for found in values(run_threads(buckets, 2, provider)):
        assert found == [missed, hit, hit, missed, missed, missed]


def bounded(rank: int, size: int, folder: str, bounds: dict[str, int]) -> list[tuple[int, int]]:
    with ring(rank, size, folder, STRICT.replace("11", "12"), **bounds) as group:
        arrays = [np.zeros(COUNT, np.float32) for _ in range(4)]
        kept = [group.register(array) for array in arrays]
        for index in (0, 1, 2, 3, 3, 0):
            check_sum(group, arrays[index], index + 1)
        for each in kept:
            each.close()
        return outcomes(group)


@pytest.mark.parametrize("bounds", [{"registration_cache_entries": 5}, {"registration_cache_bytes": 5 << 20}])
def test_the_least_recently_used_registration_is_evicted(bounds: dict[str, int]) -> None:
    port = port_of(STRICT.replace("11", "12"), LOOPBACK)
    before = port.counters["registration_evictions"]
    # Two ranks of one process have eight buckets. The cache holds at most five, with the scratch.
    for found in values(run_threads(bounded, 2, bounds)):
        assert found[4:] == [(1, 0), (0, 1)], found
    assert port.counters["registration_evictions"] > before
    assert port.counters["registrations"] <= 5


def unkept(rank: int, size: int, folder: str) -> list[tuple[int, int]]:
    with ring(rank, size, folder, "net", registration_cache_bytes=0) as group:
        bucket = np.zeros(COUNT, np.float32)
        with group.register(bucket):
            for scale in range(3):
                check_sum(group, bucket, scale)
        return outcomes(group)


def test_with_a_limit_of_0_bytes_no_registration_outlives_its_operation() -> None:
    for found in values(run_threads(unkept, 2)):
        assert found == [(0, 1)] * 3


def comes_back(rank: int, size: int, folder: str, provider: str) -> list[tuple[int, int]]:
    with ring(rank, size, folder, provider) as group:
        for owned in (True, False):
            bucket = pages()
            address = bucket.ctypes.data
            kept = group.register(bucket) if owned else None
            check_sum(group, bucket, 1)
            check_sum(group, bucket, 2)
            if kept is not None:
                kept.close()
            unmap(bucket)
            bucket = pages(address)
            check_sum(group, bucket, 3)
            unmap(bucket)
        return outcomes(group)


@pytest.mark.parametrize("provider", ["tcp", "net", STRICT])
def test_an_address_with_new_memory_is_registered_again(provider: str) -> None:
    hit, missed = (1, 0), (0, 1)
    for found in values(run_threads(comes_back, 2, provider)):
        assert found == [missed, hit, missed, missed, missed, missed]


def forks(rank: int, size: int, folder: str) -> list[tuple[int, int]]:
    with ring(rank, size, folder, STRICT) as group:
        bucket = np.zeros(COUNT, np.float32)
        kept = group.register(bucket)
        check_sum(group, bucket, 1)
        group.barrier()
        if rank == 0:
            child = os.fork()
            if child == 0:
                bucket[:] = -1
                kept.close()  # the parent's registration stays
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        group.barrier()
        check_sum(group, bucket, 2)
        kept.close()
        found = outcomes(group)
        return [each for each in found if sum(each)]


def test_a_fork_leaves_its_parents_registrations_alone() -> None:
    for found in values(run_threads(forks, 2)):
        assert found == [(0, 1), (1, 0)]


def test_the_strict_provider_reports_freed_memory_that_is_registered() -> None:
    provider = "strict:seed=13+tcp"
    found: list[Any] = []

    def rank_of(rank: int, size: int, folder: str) -> None:
        with ring(rank, size, folder, provider) as group:
            bucket = pages()
            found.append((bucket, group.group.lease((bucket.ctypes.data, bucket.nbytes))))
            check_sum(group, bucket, 1)

    values(run_threads(rank_of, 2))
    unmap(found[0][0])
    with pytest.raises(RuntimeError, match="memory was freed that is registered"):
        port_of(provider, LOOPBACK).progress()
    pages(found[0][0].ctypes.data)
    found.clear()


def test_a_write_to_a_closed_endpoint_is_an_error_and_changes_nothing() -> None:
    sender, receiver = (fabric.StreamMux("tcp", list(LOOPBACK)) for _ in range(2))
    ours, theirs = sender.open(fabric.make_doorbell()), receiver.open(fabric.make_doorbell())
    ours.connect(theirs.offer)
    theirs.connect(ours.offer)
    into, values_of = np.zeros(COUNT, np.float32), np.ones(COUNT, np.float32)
    exported = (values_of.ctypes.data, values_of.nbytes)
    over = threading.Event()

    def drive() -> None:
        while not over.wait(0.0005):
            receiver.progress()

    other = threading.Thread(target=drive)
    other.start()
    try:
        for name in (7, 8):
            assert theirs.post_receive(name, into.ctypes.data, into.nbytes)
            theirs.receive(1, 0)
            if name == 7:
                assert ours.put(*exported, name, 2_000_000_000)
                assert len(theirs.receive(into.nbytes, 2_000_000_000)) == into.nbytes
                into[:] = 0
            else:
                assert not ours.put(*exported, 9, 50_000_000)  # no receive is posted for that tag
                receiver.force_close("the test closes it")
                # The sender has its memory back once the kernel has the bytes; a later operation raises the error.
                with pytest.raises(fabric.FabricError, match=r"provider tcp;ofi_rxm: .*failed: "):
                    ours.put(*exported, name, 2_000_000_000)
                    for _ in range(2000):
                        ours.send(b"more", 1_000_000)
                        ours.flush(1_000_000)
    finally:
        over.set()
        other.join()
    assert not into.any()
