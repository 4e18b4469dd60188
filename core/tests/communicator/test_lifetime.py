"""Buffers live until their operation is done, and calls work in signal handlers, wherever Python is interrupted."""

from __future__ import annotations

import array
import queue
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from opcodes import Submissions, are_dropped, before_opcode, interrupted_at_each_opcode
from ranks import run_ranks, run_threads, values

from netfold import Communicator, FileStore, Options

pytestmark = pytest.mark.native

COUNT = 50_000  # 400 KB: no operation of rank 0 is done before rank 1 calls


def many(_: int) -> Any:
    return np.ones(COUNT)


# Buffers of a rank, and the call with them.
OPERATIONS: dict[str, tuple[Callable[[int], list[Any]], Callable[[Communicator, list[Any]], Any]]] = {
    "all_reduce": (lambda rank: [many(rank)], lambda group, own: group.all_reduce(own[0], asynchronous=True)),
    "all_reduce of an array.array": (
        lambda rank: [array.array("d", [1.0] * COUNT)],
        lambda group, own: group.all_reduce(own[0], asynchronous=True),
    ),
    "all_reduce with out": (
        lambda rank: [many(rank), many(rank)],
        lambda group, own: group.all_reduce(own[0], out=own[1], asynchronous=True),
    ),
    "reduce": (lambda rank: [many(rank)], lambda group, own: group.reduce(own[0], 0, asynchronous=True)),
    "broadcast": (lambda rank: [many(rank)], lambda group, own: group.broadcast(own[0], 1, asynchronous=True)),
    "all_gather": (
        lambda rank: [many(rank) for _ in range(3)],
        lambda group, own: group.all_gather(own[0], own[1:], asynchronous=True),
    ),
    "gather": (
        lambda rank: [many(rank) for _ in range(3)],
        lambda group, own: group.gather(own[0], own[1:], 0, asynchronous=True),
    ),
    "scatter": (
        lambda rank: [many(rank) for _ in range(3)],
        lambda group, own: group.scatter(own[1:], own[0], 1, asynchronous=True),
    ),
    "reduce_scatter": (
        lambda rank: [many(rank) for _ in range(3)],
        lambda group, own: group.reduce_scatter(own[1:], own[0], asynchronous=True),
    ),
    "all_to_all": (
        lambda rank: [many(rank) for _ in range(4)],
        lambda group, own: group.all_to_all(own[:2], own[2:], asynchronous=True),
    ),
    "send and receive": (
        lambda rank: [many(rank)],
        lambda group, own: (
            group.send(own[0], 1, asynchronous=True) if group.rank == 0 else group.receive(own[0], 0, asynchronous=True)
        ),
    ),
    "receive and send": (
        lambda rank: [many(rank)],
        lambda group, own: (
            group.receive(own[0], 1, asynchronous=True) if group.rank == 0 else group.send(own[0], 0, asynchronous=True)
        ),
    ),
}


def interrupted(rank: int, size: int, folder: str, transport: str, submitted: queue.SimpleQueue[str]) -> int:
    """Rank 0 is interrupted; rank 1 makes those calls that rank 0 submitted, and only after rank 0 has looked."""
    points = 0
    options = Options(transport=transport)
    with (
        Communicator(FileStore(folder), rank, size, options=options) as group,
        Communicator(FileStore(f"{folder}/alone{rank}"), 0, 1) as alone,
    ):
        if rank == 1:
            while name := submitted.get():
                make, call = OPERATIONS[name]
                call(group, make(rank)).wait()
            group.barrier()
            return 0
        counted: Any = Submissions(group.group.native)
        group.group._native = counted
        for name, (make, call) in OPERATIONS.items():
            references: list[weakref.ref[Any]] = []

            def watched(make: Any = make, references: list[Any] = references) -> list[Any]:
                buffers: list[Any] = make(rank)
                references[:] = [weakref.ref(each) for each in buffers]
                return buffers

            before = counted.count
            for number in interrupted_at_each_opcode(watched, partial(call, group)):
                points += 1
                if counted.count > before:
                    alive = [reference() is not None for reference in references]
                    assert any(alive), f"{name}: no buffer lives after an interrupt at bytecode {number}"
                    assert all(alive) or name in ("all_reduce with out", "scatter"), (name, number, alive)
                    submitted.put(name)
                    before = counted.count
                assert are_dropped(references, alone.barrier), f"{name}: buffers live for ever, bytecode {number}"
            submitted.put(name)  # of the run without an interrupt
        submitted.put("")
        group.barrier()
    return points


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_buffers_outlive_an_interrupt_at_any_bytecode(transport: str) -> None:
    points = values(run_threads(interrupted, 2, transport, queue.SimpleQueue(), timeout_s=150))[0]
    assert points > 50 * len(OPERATIONS)


def handled(rank: int, size: int, folder: str) -> int:
    """A handler before each bytecode of a call makes calls of its own. One rank: no call waits for another rank."""
    points = 0
    value = np.arange(3.0)
    with Communicator(FileStore(folder), rank, size) as group:
        calls: list[Callable[[], Any]] = [
            lambda: group.all_reduce(value),
            lambda: group.all_reduce(value, asynchronous=True).wait(),
            lambda: group.all_gather(value, asynchronous=True).result,
            lambda: group.all_reduce(value, out=np.empty(3)),
            lambda: group.barrier(),
        ]

        def handle() -> None:
            for call in calls:
                call()

        for call in calls:
            number = 1
            while before_opcode(number, handle, call):
                number += 1
            points += number
        number = 1
        # Closing is for once: a group for each bytecode.
        for number in range(1, 60):
            other = Communicator(FileStore(f"{folder}/{number}"), 0, 1)
            before_opcode(number, other.close, other.close)
    return points


def test_a_signal_handler_may_use_the_group_at_any_bytecode() -> None:
    assert values(run_ranks(handled, 1, timeout_s=60))[0] > 100
