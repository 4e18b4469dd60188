"""The event record: NumPy reads the records of the native engine, and their fields are right for real operations."""

from __future__ import annotations

import math
import re
import time
from typing import Any

import numpy as np
import pytest
from ranks import run_threads, running_switch, values

from netfold import Communicator, FileStore, Options
from netfold._native import engine, protocol
from netfold.profile import RECORD, records_of

SIZE = 3
MESSAGE_HEADER_BYTES = 40
MAX_PIECES = 8  # of a block, at these sizes


def test_the_layout_is_the_native_engines() -> None:
    assert RECORD.itemsize == engine.EVENT_BYTES
    assert RECORD.names is not None
    offsets = [RECORD.fields[name][1] for name in RECORD.names]  # type: ignore[index]
    assert offsets == sorted(offsets)
    assert len(records_of(bytes(3 * engine.EVENT_BYTES))) == 3


def observe(rank: int, size: int, folder: str, algorithm: str, endpoint: str | None, counts: list[int]) -> Any:
    with Communicator(
        FileStore(folder), rank, size, options=Options(switch=endpoint, algorithm=algorithm), timeout_s=20
    ) as group:
        began = time.perf_counter_ns()
        for count in counts:
            group.all_reduce(np.ones(count, np.float32), op="max")
        ended = time.perf_counter_ns()
        group.barrier()
        packet = group.group.membership.payload_bytes if group.group.membership else 0
        return group.group.events(), began, ended, packet


def fields(events: Any, count: int, algorithm: str) -> None:
    """The facts that must hold of any all_reduce of f32 by max."""
    assert (events["operation"][:count] == engine.KINDS["all_reduce"]).all()
    assert events["operation"][count] == engine.KINDS["barrier"]
    events = events[:count]
    assert events["sequence"].tolist() == list(range(1, count + 1))
    assert len(set(events["group"])) == 1
    assert (events["dtype"] == engine.DTYPES["f32"]).all()
    assert (events["wire"] == engine.DTYPES["f32"]).all()
    assert (events["reduce"] == engine.REDUCE_OPS["max"]).all()
    assert (events["algorithm"] == engine.ALGORITHMS[algorithm]).all()
    assert (events["error"] == 0).all()
    assert (events["inlined"] == 1).all(), "blocking calls with nothing queued run on the caller's thread"


def times(events: Any, began: int, ended: int) -> None:
    assert (began <= events["queued_ns"]).all()
    assert (events["queued_ns"] <= events["started_ns"]).all()
    assert (events["started_ns"] <= events["finished_ns"]).all()
    assert (events["finished_ns"] <= ended).all()
    assert (events["queued_ns"][1:] >= events["finished_ns"][:-1]).all(), "one after the other"


COUNTS = [1, 5000, 300_001]


@pytest.mark.native
def test_a_direct_all_reduce_sends_a_message_to_every_other_rank() -> None:
    for events, began, ended, _ in values(run_threads(observe, SIZE, "direct", None, COUNTS)):
        fields(events, len(COUNTS), "direct")
        times(events[: len(COUNTS)], began, ended)
        assert events["bytes"].tolist() == [*(4 * count for count in COUNTS), 0]
        expected = [(SIZE - 1) * (MESSAGE_HEADER_BYTES + 4 * count) for count in COUNTS]
        assert events["wire_bytes"].tolist() == [*expected, (SIZE - 1) * MESSAGE_HEADER_BYTES]


def ring_bytes(rank: int, count: int) -> int:
    """2n(P-1)/P: every block but the own next one while sums travel, every block but the one after that while results
    do; and a header. Blocks differ by one element at most."""
    blocks = [count // SIZE + (1 if block < count % SIZE else 0) for block in range(SIZE)]
    elements = sum(blocks[(rank - step) % SIZE] for step in range(2 * (SIZE - 1)))
    return MESSAGE_HEADER_BYTES + 4 * elements


@pytest.mark.native
def test_a_ring_sends_the_minimum_of_bytes() -> None:
    for rank, (events, began, ended, _) in enumerate(values(run_threads(observe, SIZE, "ring", None, COUNTS))):
        fields(events, len(COUNTS), "ring")
        times(events[: len(COUNTS)], began, ended)
        for event, count in zip(events, COUNTS, strict=False):
            # A word of 8 bytes before every piece, of which a block has a few.
            words, rest = divmod(int(event["wire_bytes"]) - ring_bytes(rank, count), 8)
            assert rest == 0 and 0 < words <= 2 * (SIZE - 1) * MAX_PIECES


def test_in_the_network_a_rank_sends_its_tensor_once() -> None:
    with running_switch() as switch:
        found = values(run_threads(observe, SIZE, "in_network", switch.endpoint, COUNTS))
        (line,) = switch.wait_for(r"closed after .*")
    contributions = int(re.search(r"from (\d+) contributions", line).group(1))  # type: ignore[union-attr]
    chunks = 0
    for events, began, ended, payload in found:
        fields(events, len(COUNTS), "in_network")
        times(events[: len(COUNTS)], began, ended)
        for event, count in zip(events, COUNTS, strict=False):
            packets = math.ceil(4 * count / payload)
            chunks += packets
            assert event["wire_bytes"] == (packets + event["retransmissions"]) * (payload + protocol.HEADER_BYTES)
            assert 0 <= event["slowest_rank"] < SIZE, "the switch sees the last rank"
    assert contributions == chunks + SIZE, "and a packet a rank for the barrier at the end"


def wait_for_the_slow(rank: int, size: int, folder: str, endpoint: str) -> Any:
    with Communicator(FileStore(folder), rank, size, options=Options(switch=endpoint), timeout_s=20) as group:
        group.barrier()
        if rank == 1:
            time.sleep(0.2)
        group.all_reduce(np.ones(10, np.float32))
        group.barrier()
        return group.group.events()[1]


def test_the_switch_names_the_slowest_rank() -> None:
    with running_switch() as switch:
        for event in values(run_threads(wait_for_the_slow, SIZE, switch.endpoint)):
            assert event["slowest_rank"] == 1


def fail(rank: int, size: int, folder: str) -> Any:
    with Communicator(FileStore(folder), rank, size, timeout_s=20) as group:
        with pytest.raises(RuntimeError):
            group.all_reduce(np.ones(10 + rank, np.float32))
        return group.group.events()


@pytest.mark.native
def test_a_failed_operation_leaves_a_record_with_its_error() -> None:
    for events in values(run_threads(fail, 2)):
        assert len(events) == 1
        assert engine.FAILURES[events[0]["error"]] in ("mismatch", "peer_lost")
        assert events[0]["queued_ns"] <= events[0]["started_ns"] <= events[0]["finished_ns"]


def many(rank: int, size: int, folder: str) -> Any:
    with Communicator(FileStore(folder), rank, size, timeout_s=20) as group:
        for _ in range(9000):
            group.barrier()
        return group.group.events()


@pytest.mark.native
def test_the_newest_records_are_kept_oldest_first() -> None:
    events = values(run_threads(many, 1, timeout_s=60))[0]
    assert events["sequence"].tolist() == list(range(9000 - 8192 + 1, 9001))
