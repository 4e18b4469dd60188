"""f32 tensors sent as integers: the same bits with every algorithm, with and without a switch, in any order."""

from __future__ import annotations

import functools
import hashlib
import threading
from typing import Any

import numpy as np
import pytest
from hosts import apart
from ranks import run_threads, running_switch, values

from netfold import Communicator, FileStore, Options
from netfold._native import kernels
from netfold.communicator.group import region
from netfold.tuning import build_table

pytestmark = pytest.mark.native

WIRES = ("i32", "i8")
COUNTS = (1, 127, 128, 129, 5_000, 300_001)


@functools.lru_cache(maxsize=256)
def part(rank: int, count: int, special: bool) -> Any:
    """Values over 60 binary orders of magnitude; on request, with NaN and Inf on some ranks."""
    draw = np.random.default_rng(1000 * rank + count)
    numbers = (draw.standard_normal(count) * np.exp2(draw.integers(-30, 30, count))).astype(np.float32)
    numbers[: count // 3] = 0.0 if rank % 2 else numbers[: count // 3]
    if special and count > 100:
        numbers[7], numbers[-3] = (np.inf, np.nan) if rank == 0 else (-1.0, 2.0)
        if rank == 1:
            numbers[40] = -np.inf
    return numbers


def expected(size: int, count: int, special: bool, average: bool, wire: str = "i32", sequence: int = 0) -> Any:
    """The result, computed by one process: scales, integers, their sum, floats. Read-only, since threads share it.

    i8 rounds by the operation's sequence number. Operations with NaN or Inf use i32.
    """
    in_bytes_by = sequence if wire == "i8" else 0
    with _one_at_a_time:
        return _expected(size, count, special, average, wire, in_bytes_by)


_one_at_a_time = threading.Lock()


@functools.lru_cache(maxsize=128)
def _expected(size: int, count: int, special: bool, average: bool, wire: str, sequence: int) -> Any:
    found = _computed(size, count, special, average, wire, sequence)
    found.setflags(write=False)
    return found


def _computed(size: int, count: int, special: bool, average: bool, wire: str, sequence: int) -> Any:
    parts = [part(rank, count, special) for rank in range(size)]
    if wire == "i8" and all(np.isfinite(each).all() for each in parts):
        return in_bytes(parts, sequence, average)
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
    kernels.dequantise(found, total.astype(np.int32), agreed, bits, ranks=size if average else 1)
    return found


def in_bytes(parts: list[Any], sequence: int, average: bool) -> Any:
    size, count = len(parts), len(parts[0])
    magnitudes = []
    for each in parts:
        magnitudes.append(np.empty(-(-count // 128), np.int32))
        kernels.block_magnitudes(magnitudes[-1], each)
    agreed = np.max(magnitudes, 0)
    total = np.zeros(count, np.int64)
    for rank, each in enumerate(parts):
        integers = np.empty(count, np.int8)
        kernels.quantise_bytes(integers, each, agreed, size, sequence, rank)
        total += integers
    found = np.empty(count, np.float32)
    divisor = size if average else 1
    kernels.dequantise_bytes(found, total.astype(np.int8), agreed, size, ranks=divisor)
    exact = np.sum(np.array(parts, np.float64), 0) / divisor
    unit = np.repeat(agreed.view(np.float32).astype(np.float64), 128)[:count] / (127 // size)
    assert (np.abs(found - exact) <= size * unit / divisor).all()
    return found


def newest(group: Communicator, count: int = 1) -> list[int]:
    """The sequence numbers of the last operations, in order."""
    return [int(number) for number in group.group.events()["sequence"][-count:]]


def sums(rank: int, size: int, folder: str, options: Options) -> tuple[dict[Any, str], str]:
    wire = str(options.wire_dtype)
    with Communicator(FileStore(folder), rank, size, options=options, timeout_s=30, join_timeout_s=30) as group:
        digests = {}
        for count in COUNTS:
            for special in (False, True):
                for op in ("sum", "avg"):
                    mine = part(rank, count, special).copy()
                    group.all_reduce(mine, op=op)
                    want = expected(size, count, special, op == "avg", wire, *newest(group))
                    np.testing.assert_array_equal(mine, want, strict=True)
                    digests[count, special, op] = hashlib.sha256(mine.tobytes()).hexdigest()
        # Several operations at once, with others between them.
        many = [part(rank, count, False).copy() for count in (40_000, 3, 70_001)]
        works = [group.all_reduce(each, asynchronous=True) for each in many]
        whole = np.full(1000, rank, np.int64)
        works.append(group.all_reduce(whole, asynchronous=True))
        for work in works:
            work.wait()
        for each, sequence in zip(many, newest(group, 4), strict=False):
            want = expected(size, each.size, False, False, wire, sequence)
            np.testing.assert_array_equal(each, want, strict=True)
        assert (whole == size * (size - 1) // 2).all()
        # Other dtypes and operators are not converted.
        least = part(rank, 5_000, False).copy()
        group.all_reduce(least, op="min")
        np.testing.assert_array_equal(least, np.min([part(r, 5_000, False) for r in range(size)], 0), strict=True)
        double = part(rank, 5_000, False).astype(np.float64)
        group.all_reduce(double)
        np.testing.assert_allclose(double, np.sum([part(r, 5_000, False).astype(np.float64) for r in range(size)], 0))
        return digests, group.group.why("all_reduce", 1 << 20)


WAYS = ("direct", "ring", "halving_doubling", "tree", "shared_memory", "in_network", "split", "hierarchical")


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_sum_has_the_same_bits_by_every_algorithm(monkeypatch: pytest.MonkeyPatch, size: int, wire: str) -> None:
    found = {}
    with running_switch() as switch:
        for way in WAYS:
            endpoint = switch.endpoint if way in ("in_network", "split") else None
            with monkeypatch.context() as patch:
                if way == "hierarchical":
                    if size == 2:
                        continue
                    patch.setattr(*apart(tuple(rank % 2 for rank in range(size))))
                options = Options(algorithm=f"all_reduce={way}", wire_dtype=wire, switch=endpoint)
                for digests, why in values(run_threads(sums, size, options, timeout_s=90)):
                    assert f"f32 tensors travel as {wire}" in why and why.startswith(way), why
                    found.setdefault(way, digests)
                    assert digests == found["direct"], way


@pytest.mark.parametrize("wire", WIRES)
def test_hosts_of_several_ranks_add_integers_through_a_switch(monkeypatch: pytest.MonkeyPatch, wire: str) -> None:
    monkeypatch.setattr(*apart((0, 0, 1, 1)))
    with running_switch() as switch:
        options = Options(wire_dtype=wire, switch=switch.endpoint, algorithm="all_reduce=hierarchical:in_network")
        found = values(run_threads(sums, 4, options, timeout_s=90))
        switch.wait_for("starts with 2 workers")
    assert all(why.startswith("hierarchical (NETFOLD_ALGORITHM=") for _, why in found), found


def bytes_sent(rank: int, size: int, folder: str, options: Options) -> int:
    with Communicator(FileStore(folder), rank, size, options=options, timeout_s=20, join_timeout_s=20) as group:
        group.all_reduce(np.ones(1 << 20, np.float32))
        return int(group.group.events()["wire_bytes"][-1])


@pytest.mark.parametrize("way", ["ring", "in_network"])
def test_i8_sends_a_quarter_of_the_bytes(way: str) -> None:
    sent = {}
    with running_switch() as switch:
        for wire in ("f32", "i32", "i8"):
            endpoint = switch.endpoint if way == "in_network" else None
            options = Options(algorithm=f"all_reduce={way}", wire_dtype=wire, switch=endpoint)
            sent[wire] = min(values(run_threads(bytes_sent, 2, options)))
    # The scales of blocks are 1/128 of f32's bytes. Retransmissions add a little.
    assert 1 / 4 < sent["i8"] / sent["f32"] < 0.3
    assert 1 < sent["i32"] / sent["f32"] < 1.1


def disagree(rank: int, size: int, folder: str, options: Options) -> None:
    with Communicator(FileStore(folder), rank, size, options=options, timeout_s=20, join_timeout_s=20) as group:
        group.all_reduce(np.zeros(1000 + 128 * (rank == 1), np.float32))


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("way", ["ring", "shared_memory", "in_network"])
def test_ranks_with_different_sizes_get_both_sizes(way: str, wire: str) -> None:
    with running_switch() as switch:
        endpoint = switch.endpoint if way == "in_network" else None
        options = Options(algorithm=f"all_reduce={way}", wire_dtype=wire, switch=endpoint)
        outcomes = run_threads(disagree, 2, options)
    assert {outcome.error for outcome in outcomes} <= {"Mismatch", "PeerLost"}, outcomes
    assert "Mismatch" in {outcome.error for outcome in outcomes}, outcomes


STEPS = 400


def gradient(rank: int) -> Any:
    return np.random.default_rng(rank).standard_normal(1000).astype(np.float32)


def with_residual(rank: int, size: int, folder: str, options: Options) -> dict[str, Any]:
    """Sum the same tensor many times, with a residual and without, by the native call that takes one."""
    count = 1000
    with Communicator(FileStore(folder), rank, size, options=options, timeout_s=30, join_timeout_s=30) as group:
        exact = np.sum([gradient(r).astype(np.float64) for r in range(size)], 0)

        def total(residual: Any | None) -> Any:
            found = np.zeros(count)
            for _ in range(STEPS):
                mine = gradient(rank)
                inputs = [region(residual)] if residual is not None else []
                operation = group.group.submit(
                    "all_reduce", dtype="f32", inputs=inputs, outputs=[region(mine)], wait_here=True
                )
                group.group.wait(operation)
                found += mine
            return found

        residual = np.zeros(count, np.float32)
        kept, plain = total(residual), total(None)
        residuals = group.all_gather(residual)
        missing = residuals.astype(np.float64).sum(0)
        # An operation with an infinity leaves no infinity in the residual.
        mine = np.ones(count, np.float32)
        mine[3] = np.inf if rank == 0 else 1
        residual[:] = 1
        group.group.wait(
            group.group.submit(
                "all_reduce", dtype="f32", inputs=[region(residual)], outputs=[region(mine)], wait_here=True
            )
        )
        return {
            "exact": exact,
            "kept": kept,
            "plain": plain,
            "missing": missing,
            "after": residual.copy(),
            "infinite": mine,
        }


@pytest.mark.parametrize("way", ["ring", "in_network"])
def test_a_residual_adds_the_rounding_error_to_the_next_sum(way: str) -> None:
    """After any number of steps the sum lacks only the residuals, less than a unit a rank.

    Without residuals the errors of the steps add up like a random walk.
    """
    size = 3
    with running_switch() as switch:
        endpoint = switch.endpoint if way == "in_network" else None
        options = Options(algorithm=f"all_reduce={way}", wire_dtype="i8", switch=endpoint)
        for found in values(run_threads(with_residual, size, options, timeout_s=90)):
            largest = np.max([np.abs(gradient(rank)) for rank in range(size)], 0).astype(np.float64)
            padded = np.pad(largest, (0, 24)).reshape(-1, 128).max(1)
            # A contribution is at most the block's greatest magnitude plus a unit of rounding error.
            unit = np.repeat(padded, 128)[:1000] * (1 + 1 / 41) / 42
            given = STEPS * found["exact"]
            rounding = STEPS * 3 * np.repeat(padded, 128)[:1000] * 2.0**-21
            assert (np.abs(found["kept"] + found["missing"] - given) <= rounding).all()
            assert (np.abs(found["kept"] - given) <= size * unit + rounding).all()
            walk = np.abs(found["plain"] - given) / unit
            assert (walk > size * 1.1).mean() > 0.5, "without a residual it is not so: the bound above can fail"
            assert not found["after"].any()
            assert found["infinite"][3] == np.inf
            assert np.isnan(found["infinite"][4]), "the block's others"
            assert (found["infinite"][128:] == 6).all(), "what was in the residual was added before"


def give_residuals(rank: int, size: int, folder: str, options: Options) -> list[str]:
    with Communicator(FileStore(folder), rank, size, options=options, timeout_s=20, join_timeout_s=20) as group:
        mine, said = np.zeros(10, np.float32), []
        for kind in ({"dtype": "f32"}, {"dtype": "i32"}, {"dtype": "f32", "reduce": "max"}, {"dtype": "f32", "cut": 1}):
            residual = np.zeros(10 - kind.pop("cut", 0), np.float32)
            try:
                group.group.wait(
                    group.group.submit(
                        "all_reduce", **kind, inputs=[region(residual)], outputs=[region(mine)], wait_here=True
                    )
                )
                said.append("")
            except ValueError as error:
                said.append(str(error))
        return said


def test_a_residual_is_refused_where_nothing_is_rounded() -> None:
    reason = "a residual is for sums of f32 that travel as i8"
    for wire, plain in (("i8", ""), ("i32", reason), ("bf16", reason), ("auto", reason)):
        for said in values(run_threads(give_residuals, 2, Options(algorithm="all_reduce=ring", wire_dtype=wire))):
            assert plain in said[0] and bool(plain) == bool(said[0])
            assert reason in said[1] and reason in said[2]
            assert "takes one residual, as long as the tensor" in said[3]


def test_i8_is_refused_for_groups_whose_sums_overflow_a_byte(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="NETFOLD_WIRE_DTYPE=i8 takes at most 32 ranks, not 33: a byte"):
        Communicator(FileStore(str(tmp_path)), 0, 33, options=Options(wire_dtype="i8"))


def test_i32_is_refused_for_groups_whose_sums_leave_too_few_bits() -> None:
    assert build_table(ranks=16384, switch=None, wire="i32")
    with pytest.raises(ValueError, match="NETFOLD_WIRE_DTYPE=i32 takes at most 16384 ranks, not 16385: an integer"):
        build_table(ranks=16385, switch=None, wire="i32")
