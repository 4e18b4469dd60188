"""Features of `probe.py`: messages between two ranks, and the Work of an operation."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from probe import World, feature
from probe_collectives import everyone, mine, same


@feature()
def send_recv(world: World) -> None:
    import torch
    import torch.distributed as dist

    for source in (0, 1):
        tensor = mine(source) if world.rank == source else torch.empty(6)
        if world.rank == source:
            dist.send(tensor, 1 - source)
        else:
            assert dist.recv(tensor, source) == source
        same(tensor, mine(source))


@feature()
def isend_irecv(world: World) -> None:
    import torch
    import torch.distributed as dist

    got = torch.empty(6)
    pending = [dist.irecv(got, 1 - world.rank), dist.isend(mine(world.rank), 1 - world.rank)]
    for work in pending:
        work.wait()
    same(got, mine(1 - world.rank))


@feature()
def recv_any_source(world: World) -> None:
    import torch
    import torch.distributed as dist

    got = torch.empty(6)
    if world.rank == 0:
        assert dist.recv(got) == 1
        same(got, mine(1))
    else:
        dist.send(mine(1), 0)


@feature()
def tags(world: World) -> None:
    """Messages are matched by tags, in any order."""
    import torch
    import torch.distributed as dist

    if world.rank == 0:
        pending = [dist.isend(mine(tag), 1, tag=tag) for tag in (5, 6, 7)]
        for work in pending:
            work.wait()
    else:
        for tag in (7, 5, 6):
            got = torch.empty(6)
            dist.recv(got, 0, tag=tag)
            same(got, mine(tag))


@feature()
def batch_isend_irecv(world: World) -> None:
    import torch
    import torch.distributed as dist

    other = 1 - world.rank
    got = [torch.empty(6), torch.empty(4)]
    operations = [
        dist.P2POp(dist.isend, mine(world.rank), other),
        dist.P2POp(dist.irecv, got[0], other),
        dist.P2POp(dist.isend, mine(world.rank, 4), other),
        dist.P2POp(dist.irecv, got[1], other),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    same(got[0], mine(other))
    same(got[1], mine(other, 4))


@feature()
def object_point_to_point(world: World) -> None:
    import torch.distributed as dist

    sent = [{"a": [1, 2]}, "text"]
    if world.rank == 0:
        dist.send_object_list(sent, dst=1)
    else:
        got: list[Any] = [None, None]
        dist.recv_object_list(got, src=0)
        assert got == sent


@feature()
def wait_with_a_timeout(world: World) -> None:
    """`work.wait(timeout)` raises once it has expired; the process lives, and another group works."""
    import torch
    import torch.distributed as dist

    other = dist.new_group()
    if world.rank == 0:
        work = dist.all_reduce(torch.ones(4), async_op=True)
        began = time.monotonic()
        try:
            work.wait(timedelta(seconds=0.3))
        except RuntimeError as error:
            text = str(error).lower()
            assert "timed out" in text or "timeout" in text or "did not finish" in text, text
        else:
            raise AssertionError("wait returned, though rank 1 never called")
        assert 0.2 < time.monotonic() - began < 10
    tensor = mine(world.rank)
    dist.all_reduce(tensor, group=other)
    same(tensor, everyone(world.size).sum(0))
    if world.rank == 1:
        dist.all_reduce(torch.ones(4))  # no rank leaves early


@feature()
def wait_with_a_timeout_for_a_message(world: World) -> None:
    import torch
    import torch.distributed as dist

    if world.rank == 0:
        work = dist.irecv(torch.empty(4), 1)
        try:
            work.wait(timedelta(seconds=0.3))
        except RuntimeError as error:
            text = str(error).lower()
            assert "timed out" in text or "timeout" in text or "did not finish" in text, text
        else:
            raise AssertionError("wait returned, though nothing was sent")
    other = dist.new_group()
    tensor = mine(world.rank)
    dist.all_reduce(tensor, group=other)
    same(tensor, everyone(world.size).sum(0))


@feature()
def futures(world: World) -> None:
    import torch.distributed as dist

    tensor = mine(world.rank, 1000)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2).then(lambda done: done.value() + 1)
    same(doubled.wait(), everyone(world.size, 1000).sum(0) * 2 + 1)
    assert future.done()


@feature()
def works_without_a_waiter(world: World) -> None:
    """A Work may be dropped; the operation is done all the same, before later ones of its group."""
    import torch
    import torch.distributed as dist

    tensors = [mine(world.rank, count) for count in range(1, 50)]
    for tensor in tensors:
        dist.all_reduce(tensor, async_op=True)
    dist.all_reduce(torch.ones(1))
    last = dist.all_reduce(torch.ones(1), async_op=True)
    while not last.is_completed():
        time.sleep(0.001)
    dist.barrier()
    for tensor in tensors:
        same(tensor, everyone(world.size, len(tensor)).sum(0))
