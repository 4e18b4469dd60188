"""Tensors live until their operation is done, and calls work in signal handlers, wherever Python is interrupted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from opcodes import Submissions, are_dropped, before_opcode, interrupted_at_each_opcode
from ranks import run_ranks, values

pytest.importorskip("torch")

COUNT = 100_000  # 400 KB: no operation of rank 0 is done before rank 1 calls

# The number of tensors of a call, and the call, which is one operation.
Call = tuple[int, Callable[[list[Any]], Any]]


def _calls(dist: Any) -> list[Call]:
    rank = dist.get_rank()
    return [
        (1, lambda own: dist.all_reduce(own[0], async_op=True)),
        (1, lambda own: dist.all_reduce(own[0][::2], async_op=True)),
        (1, lambda own: dist.broadcast(own[0], 1, async_op=True)),
        (3, lambda own: dist.all_gather(own[1:], own[0], async_op=True)),
        (3, lambda own: dist.reduce_scatter(own[0], own[1:], async_op=True)),
        (4, lambda own: dist.all_to_all(own[:2], own[2:], async_op=True)),
        (1, lambda own: dist.isend(own[0], 1) if rank == 0 else dist.irecv(own[0], 0)),
        (1, lambda own: dist.irecv(own[0], 1) if rank == 0 else dist.isend(own[0], 0)),
    ]


def interrupted(rank: int, size: int, folder: str) -> int:
    """Rank 0 is interrupted; rank 1 makes those calls that rank 0 submitted, and only after rank 0 has looked."""
    import torch
    import torch.distributed as dist
    from torch.multiprocessing.reductions import StorageWeakRef

    from netfold import Communicator, FileStore
    from netfold.torch.operations import operations_of

    dist.init_process_group("netfold", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    told = dist.new_group(backend="gloo")
    word = torch.zeros(1, dtype=torch.int64)  # the number of a call; -1: the end
    points = 0
    if rank == 1:
        dist.recv(word, 0, group=told)
        while word.item() >= 0:
            count, call = _calls(dist)[int(word)]
            call([torch.ones(COUNT) for _ in range(count)]).wait()
            dist.recv(word, 0, group=told)
    else:
        operations = operations_of(dist.group.WORLD)
        assert operations is not None
        counted: Any = Submissions(operations.netfold.native)
        operations.netfold._native = counted
        alone = Communicator(FileStore(f"{folder}/alone"), 0, 1)
        for index, (count, call) in enumerate(_calls(dist)):
            storages: list[Any] = []

            def watched(count: int = count, storages: list[Any] = storages) -> list[Any]:
                tensors = [torch.ones(COUNT) for _ in range(count)]
                storages[:] = [StorageWeakRef(each.untyped_storage()) for each in tensors]
                return tensors

            before = counted.count
            for number in interrupted_at_each_opcode(watched, call):
                points += 1
                if counted.count > before:
                    freed = [storage.expired() for storage in storages]
                    assert not any(freed), f"call {index}: freed after an interrupt at bytecode {number}: {freed}"
                    dist.send(word.fill_(index), 1, group=told)
                    before = counted.count
                references = [lambda each=each: None if each.expired() else each for each in storages]
                assert are_dropped(references, alone.barrier), f"call {index}: alive for ever, bytecode {number}"
            dist.send(word.fill_(index), 1, group=told)  # of the run without an interrupt
        dist.send(word.fill_(-1), 1, group=told)
        alone.close()
    dist.barrier()
    dist.destroy_process_group()
    return points


def test_tensors_outlive_an_interrupt_at_any_bytecode() -> None:
    assert values(run_ranks(interrupted, 2, timeout_s=150))[0] > 500


def handled(rank: int, size: int, folder: str) -> int:
    """A handler before each bytecode of a call makes calls of its own. One rank: no call waits for another rank."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("netfold", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    value, pair = torch.ones(4), torch.ones(2, 2)
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(value),
        lambda: dist.all_reduce(value, async_op=True).wait(),
        lambda: dist.all_reduce(pair.t(), async_op=True).get_future().wait(),
        lambda: dist.all_gather([value.clone()], value),
        lambda: dist.barrier(),
    ]

    def handle() -> None:
        for call in calls:
            call()

    points = 0
    for call in calls:
        number = 1
        while before_opcode(number, handle, call):
            number += 1
        points += number
    dist.destroy_process_group()
    return points


def test_a_signal_handler_may_use_the_group_at_any_bytecode() -> None:
    assert values(run_ranks(handled, 1, timeout_s=150))[0] > 300
