"""Every all-reduce against its stated order of summation, bit for bit, over ranks, sizes, dtypes, operators and wires.

For each number of ranks, one set of processes runs all cases and reports; each test below checks its case.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks, running_switch, values
from reductions import (
    FLOAT_OPS,
    INTEGER_OPS,
    UNIT_ROUNDOFF,
    by_rank,
    by_ring,
    contribution,
    rounded,
)

from netfold import Communicator, FileStore, Options
from netfold.profile import Records
from netfold.switch_protocol import control_messages

pytestmark = pytest.mark.xdist_group("algorithms")  # the worlds are made once

RANKS = (1, 2, 3, 4, 5)
SIZES = (0, 1, 2, 7, 351, 352, 353, 1000, 65537, 1_000_003)
# In-network, a chunk is 352 values of 4 bytes over Ethernet and 8192 over loopback: tails on both sides of each.
LOOPBACK_SIZES = (8191, 8192, 8193, 300_007)
DTYPES = ("float32", "float64", "int32", "int64", "uint8", "int8", "float16", "int16", "uint16", "uint32", "uint64")
# By label: algorithm, wire, payload bytes of a packet (None: as the path's MTU allows)
ALGORITHMS: dict[str, tuple[str, str, int | None]] = {
    "direct": ("direct", "auto", None),
    "shared_memory": ("shared_memory", "auto", None),
    "ring": ("ring", "auto", None),
    "ring_bf16": ("ring", "bf16", None),
    "ring_f16": ("ring", "f16", None),
    "in_network": ("in_network", "auto", 1408),
    "in_network_loopback": ("in_network", "auto", None),
    "in_network_bf16": ("in_network", "bf16", 1408),
    "in_network_f16": ("in_network", "f16", 1408),
}
BACK_TO_BACK = 200

Case = tuple[str, str, int]  # op, dtype, elements


def cases_of(label: str) -> list[Case]:
    _, wire, _ = ALGORITHMS[label]
    if wire != "auto":  # only f32 tensors are converted
        found = [("sum", "float32", size) for size in SIZES]
        found += [(op, "float32", 353) for op in FLOAT_OPS]
        return [*found, ("sum", "float64", 353), ("sum", "int32", 353)]
    if label == "in_network_loopback":
        return [("sum", dtype, size) for dtype in ("float32", "int32", "float16", "int8") for size in LOOPBACK_SIZES]
    found = [("sum", "float32", size) for size in SIZES] + [("sum", "int32", size) for size in SIZES]
    for dtype in DTYPES:
        found += [("sum", dtype, size) for size in (0, 1, 2, 7, 351, 352, 353, 65537)]
        ops = FLOAT_OPS if dtype.startswith("float") else INTEGER_OPS
        found += [(op, dtype, size) for op in ops for size in (5, 1000)]
    return list(dict.fromkeys(found))


def fold_of(label: str) -> Any:
    algorithm, wire, _ = ALGORITHMS[label]
    reference = by_ring if algorithm == "ring" else by_rank

    def of(op: str, parts: Any) -> Any:
        dtype = parts[0].dtype
        travels = wire != "auto" and dtype == np.float32 and len(parts) > 1
        # A switch's sum comes in the tensor's type, and each rank divides it.
        divides_rounded = algorithm == "in_network" and (op, dtype) == ("avg", np.float16) and len(parts) > 1
        return reference(op, parts, wire if travels else "f16" if divides_rounded else "f32")

    return of


@functools.cache
def contributions(size: int, count: int, dtype: str) -> tuple[Any, ...]:
    return tuple(contribution(rank, count, dtype) for rank in range(size))


def reduce_everything(rank: int, size: int, folder: str, switch: str) -> dict[str, Any]:
    """By label, {case: (difference or "", digest of the bits)}, with the back-to-back runs and events."""
    found: dict[str, Any] = {}
    candidates = control_messages.PAYLOAD_CANDIDATES
    for label, (algorithm, wire, payload) in ALGORITHMS.items():
        control_messages.PAYLOAD_CANDIDATES = candidates if payload is None else (payload,)
        options = Options(switch=switch if algorithm == "in_network" else None, algorithm=algorithm, wire_dtype=wire)
        with Communicator(
            FileStore(f"{folder}/{label}"), rank, size, options=options, timeout_s=30, join_timeout_s=30
        ) as group:
            found[label] = {
                "cases": {case: _reduce(group, fold_of(label), *case) for case in cases_of(label)},
                "back_to_back": _back_to_back(group, fold_of(label)),
                "why": group.group.why("all_reduce", 1 << 24),
                "slow": _events_out_of_order(group.group.events()),
            }
            group.barrier()
    return found


def _reduce(group: Communicator, reference: Any, op: str, dtype: str, count: int) -> tuple[str, str]:
    """Rank 0 compares its result with the stated order; the other ranks' digests are compared with rank 0's."""
    mine = contribution(group.rank, count, dtype)
    group.all_reduce(mine, op=op)
    wrong = "" if group.rank else _difference(mine, reference(op, contributions(group.size, count, dtype)))
    return wrong, hashlib.sha256(mine.tobytes()).hexdigest()


def _back_to_back(group: Communicator, reference: Any) -> tuple[str, str]:
    """Run many operations of changing length back to back, and check the results at the end.

    Returns the first difference from the stated order (rank 0 only) and a digest of all results.
    """
    sizes = [1 + (17 * index * index) % 3001 for index in range(BACK_TO_BACK)]
    buffers = []
    for index, count in enumerate(sizes):
        mine = contribution(group.rank, 3002, "float32")[:count] + np.float32(index)
        group.all_reduce(mine)
        buffers.append(mine)
    digest = hashlib.sha256(b"".join(buffer.tobytes() for buffer in buffers)).hexdigest()
    for index, (count, got) in enumerate(zip(sizes, buffers, strict=True)):
        if group.rank:
            break
        parts = [part[:count] + np.float32(index) for part in contributions(group.size, 3002, "float32")]
        wrong = _difference(got, reference("sum", parts))
        if wrong:
            return f"operation {index} of {count}: {wrong}", digest
    return "", digest


def _difference(got: Any, expected: Any) -> str:
    same = got.view(np.uint8).reshape(-1, got.itemsize) == expected.view(np.uint8).reshape(-1, got.itemsize)
    wrong = np.flatnonzero(~same.all(axis=1))
    if len(wrong) == 0:
        return ""
    at = wrong[0]
    return f"{len(wrong)} of {len(got)} differ; first at {at}: {got[at]!r}, expected {expected[at]!r}"


def _events_out_of_order(events: Records) -> int:
    ordered = (events["queued_ns"] <= events["started_ns"]) & (events["started_ns"] <= events["finished_ns"])
    return int((~ordered).sum())


@functools.cache
def world(size: int) -> list[dict[str, Any]]:
    with running_switch() as switch:
        return values(run_ranks(reduce_everything, size, switch.endpoint, timeout_s=120))


labels = pytest.mark.parametrize("label", list(ALGORITHMS))
ranks = pytest.mark.parametrize("size", RANKS)


@labels
@ranks
def test_all_reduce_gives_the_bits_of_its_stated_order_of_summation(size: int, label: str) -> None:
    """Checks rank 0; the next test compares the other ranks with rank 0."""
    assert set(world(size)[0][label]["cases"]) == set(cases_of(label))
    wrong = {case: text for case, (text, _) in world(size)[0][label]["cases"].items() if text}
    assert not wrong


@labels
@ranks
def test_all_ranks_hold_the_same_bits(size: int, label: str) -> None:
    first, *others = world(size)
    for rank, other in enumerate(others, 1):
        for case, (_, digest) in first[label]["cases"].items():
            assert other[label]["cases"][case][1] == digest, f"{case}: rank {rank} differs from rank 0"


@labels
@ranks
def test_operations_that_follow_each_other_without_a_barrier_do_not_mix(size: int, label: str) -> None:
    found = [each[label]["back_to_back"] for each in world(size)]
    assert found[0][0] == ""
    assert found == [found[0]] * size


@labels
@ranks
def test_the_requested_algorithm_runs(size: int, label: str) -> None:
    algorithm = "local" if size == 1 else ALGORITHMS[label][0]
    for found in world(size):
        assert found[label]["why"].startswith(f"{algorithm} (")


@ranks
def test_direct_and_in_network_give_the_same_bits(size: int) -> None:
    found = world(size)[0]
    for case in cases_of("in_network"):
        # Behind a switch each rank divides the rounded sum, which is exact for a power of two alone.
        if case[:2] == ("avg", "float16") and size & (size - 1):
            continue
        assert found["direct"]["cases"][case][1] == found["in_network"]["cases"][case][1], case


@pytest.mark.parametrize("wire", ["bf16", "f16"])
@pytest.mark.parametrize("algorithm", ["ring", "in_network"])
@pytest.mark.parametrize("size", [2, 3, 4, 5, 64])
def test_a_wire_format_loses_no_more_than_its_roundings(size: int, algorithm: str, wire: str) -> None:
    """Compare the stated order of summation, which the tests above check bit by bit, with the sum in f64.

    Let u be the wire's unit roundoff, v that of f32, in which sums are made. In-network, a contribution x_r is
    rounded to the wire (1 + d, |d| <= u), then takes part in at most P - 1 additions (each 1 + e, |e| <= v), and the
    result is rounded once more: |error| <= ((1 + u)^2 (1 + v)^(P-1) - 1) sum |x_r|. In a ring the partial sum is
    rounded before each of P - 1 hops and once by the block's owner, P roundings in all for the first contribution, so
    the exponent 2 becomes P. Values are within f16's normal range, where rounding errors are relative.
    """
    parts = [contribution(rank, 4099, "float32") for rank in range(size)]
    parts = [np.where(np.abs(part) < 0.5, np.float32(0.5), part) for part in parts]
    reference = by_ring if algorithm == "ring" else by_rank
    got = reference("sum", parts, wire).astype(np.float64)
    exact = np.sum([part.astype(np.float64) for part in parts], axis=0)
    magnitude = np.sum([np.abs(part).astype(np.float64) for part in parts], axis=0)
    u, v = UNIT_ROUNDOFF[wire], UNIT_ROUNDOFF["f32"]
    roundings = size if algorithm == "ring" else 2
    # A partial sum that cancels to below f16's normal range rounds with an absolute error instead.
    floor = roundings * 2.0**-25 if wire == "f16" else 0.0
    bound = ((1 + u) ** roundings * (1 + v) ** (size - 1) - 1) * magnitude + floor
    assert (np.abs(got - exact) <= bound).all()
    assert (np.abs(got - exact) > 0).any(), "nothing was rounded: the bound was not tested"


def test_the_reference_rounds_to_bf16_ties_to_even() -> None:
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20], np.float32)
    assert rounded(ties, "bf16").tolist() == [1.0, 1 + 2**-6, 1 + 2**-7]
