"""f32 tensors that travel as integers: the same bits by every algorithm, through a switch and without, in any order."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import numpy as np
import pytest
from hosts import apart
from ranks import run_threads, running_switch, values

from netfold import Communicator, FileStore, Options
from netfold._native import kernels

pytestmark = pytest.mark.native

COUNTS = (1, 127, 128, 129, 5_000, 300_001)


@functools.lru_cache(maxsize=32)
def part(rank: int, count: int, special: bool) -> Any:
    """Values over 60 binary orders of magnitude; and, if asked for, those that are no numbers, on some ranks."""
    draw = np.random.default_rng(1000 * rank + count)
    numbers = (draw.standard_normal(count) * np.exp2(draw.integers(-30, 30, count))).astype(np.float32)
    numbers[: count // 3] = 0.0 if rank % 2 else numbers[: count // 3]
    if special and count > 100:
        numbers[7], numbers[-3] = (np.inf, np.nan) if rank == 0 else (-1.0, 2.0)
        if rank == 1:
            numbers[40] = -np.inf
    return numbers


def expected(size: int, count: int, special: bool, average: bool) -> Any:
    """In one piece, by one process: exponents, integers, their sum, floats."""
    parts = [part(rank, count, special) for rank in range(size)]
    exponents = []
    for each in parts:
        exponents.append(np.empty(-(-count // 128), np.int16))
        kernels.block_exponents(exponents[-1], each)
    agreed = np.max(exponents, 0)
    bits = (size - 1).bit_length()
    total = np.zeros(count, np.int64)
    for each in parts:
        integers = np.empty(count, np.int32)
        kernels.quantise(integers, each, agreed, bits)
        total += integers
    found = np.empty(count, np.float32)
    kernels.dequantise(found, total.astype(np.int32), agreed, bits)
    return found / np.float32(size) if average else found


def sums(rank: int, size: int, folder: str, options: Options) -> tuple[dict[Any, str], str]:
    with Communicator(FileStore(folder), rank, size, options=options, timeout_s=30, join_timeout_s=30) as group:
        digests = {}
        for count in COUNTS:
            for special in (False, True):
                for op in ("sum", "avg"):
                    mine = part(rank, count, special).copy()
                    group.all_reduce(mine, op=op)
                    np.testing.assert_array_equal(mine, expected(size, count, special, op == "avg"), strict=True)
                    digests[count, special, op] = hashlib.sha256(mine.tobytes()).hexdigest()
        # Several at once, and others between them.
        many = [part(rank, count, False).copy() for count in (40_000, 3, 70_001)]
        works = [group.all_reduce(each, asynchronous=True) for each in many]
        whole = np.full(1000, rank, np.int64)
        works.append(group.all_reduce(whole, asynchronous=True))
        for work in works:
            work.wait()
        for each in many:
            np.testing.assert_array_equal(each, expected(size, each.size, False, False), strict=True)
        assert (whole == size * (size - 1) // 2).all()
        # What is no sum of f32 travels as it is.
        least = part(rank, 5_000, False).copy()
        group.all_reduce(least, op="min")
        np.testing.assert_array_equal(least, np.min([part(r, 5_000, False) for r in range(size)], 0), strict=True)
        double = part(rank, 5_000, False).astype(np.float64)
        group.all_reduce(double)
        np.testing.assert_allclose(double, np.sum([part(r, 5_000, False).astype(np.float64) for r in range(size)], 0))
        return digests, group.group.why("all_reduce", 1 << 20)


WAYS = ("direct", "ring", "halving_doubling", "tree", "shared_memory", "in_network", "hierarchical")


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_sum_has_the_same_bits_by_every_algorithm(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    found = {}
    with running_switch() as switch:
        for way in WAYS:
            endpoint = switch.endpoint if way == "in_network" else None
            with monkeypatch.context() as patch:
                if way == "hierarchical":
                    if size == 2:
                        continue
                    patch.setattr(*apart(tuple(rank % 2 for rank in range(size))))
                options = Options(algorithm=f"all_reduce={way}", wire="i32", switch=endpoint)
                for digests, why in values(run_threads(sums, size, options, timeout_s=90)):
                    assert "f32 tensors travel as i32" in why and why.startswith(way), why
                    found.setdefault(way, digests)
                    assert digests == found["direct"], way


def test_hosts_of_several_ranks_add_integers_through_a_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*apart((0, 0, 1, 1)))
    with running_switch() as switch:
        found = values(run_threads(sums, 4, Options(wire="i32", switch=switch.endpoint), timeout_s=90))
        switch.wait_for("starts with 2 workers")
    assert all(why.startswith("hierarchical (in_network between hosts") for _, why in found), found


def disagree(rank: int, size: int, folder: str, options: Options) -> None:
    with Communicator(FileStore(folder), rank, size, options=options, timeout_s=20, join_timeout_s=20) as group:
        group.all_reduce(np.zeros(1000 + 128 * (rank == 1), np.float32))


@pytest.mark.parametrize("way", ["ring", "shared_memory", "in_network"])
def test_ranks_with_different_sizes_hear_of_both(way: str) -> None:
    with running_switch() as switch:
        endpoint = switch.endpoint if way == "in_network" else None
        options = Options(algorithm=f"all_reduce={way}", wire="i32", switch=endpoint)
        outcomes = run_threads(disagree, 2, options)
    assert {outcome.error for outcome in outcomes} <= {"Mismatch", "PeerLost"}, outcomes
    assert "Mismatch" in {outcome.error for outcome in outcomes}, outcomes
