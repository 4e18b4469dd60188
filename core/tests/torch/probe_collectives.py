"""Features of `probe.py`: collectives on tensors and objects. Every element has a value of its own."""

from __future__ import annotations

from typing import Any

from probe import World, feature


def mine(rank: int, count: int = 6, dtype: Any = None) -> Any:
    """`count` distinct values that no other rank has."""
    import torch

    return (torch.arange(count) + 10 * rank + 1).to(dtype or torch.float32)


def everyone(size: int, count: int = 6, dtype: Any = None) -> Any:
    """[size, count]: `mine` of each rank."""
    import torch

    return torch.stack([mine(rank, count, dtype) for rank in range(size)])


def both(call: Any) -> None:
    """Run a collective synchronously and asynchronously; `call(async_op)` returns the Work and a check."""
    for async_op in (False, True):
        work, check = call(async_op)
        if async_op:
            assert work is not None, "an asynchronous call returned no Work"
            work.wait()
        check()


def same(got: Any, expected: Any) -> None:
    import torch

    assert torch.equal(got, expected), f"{got} is not {expected}"


@feature()
def all_reduce(world: World) -> None:
    import torch.distributed as dist

    whole = everyone(world.size)
    expected = {"SUM": whole.sum(0), "PRODUCT": whole.prod(0), "MIN": whole.amin(0), "MAX": whole.amax(0)}
    for name, result in expected.items():

        def call(async_op: bool, name: str = name, result: Any = result) -> Any:
            tensor = mine(world.rank)
            work = dist.all_reduce(tensor, getattr(dist.ReduceOp, name), async_op=async_op)
            return work, lambda: same(tensor, result)

        both(call)


@feature()
def all_reduce_avg(world: World) -> None:
    import torch.distributed as dist

    tensor = mine(world.rank)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    same(tensor, everyone(world.size).mean(0))


@feature()
def all_reduce_bitwise(world: World) -> None:
    import torch
    import torch.distributed as dist

    first, second = everyone(2, dtype=torch.int64)
    for op, result in (("BAND", first & second), ("BOR", first | second), ("BXOR", first ^ second)):
        tensor = mine(world.rank, dtype=torch.int64)
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
        same(tensor, result)


@feature()
def all_reduce_dtypes(world: World) -> None:
    import torch
    import torch.distributed as dist

    for name in ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64", "complex64"):
        dtype = getattr(torch, name)
        tensor = mine(world.rank, dtype=dtype)
        dist.all_reduce(tensor)
        same(tensor, everyone(world.size, dtype=dtype).sum(0))


@feature()
def all_reduce_sparse(world: World) -> None:
    import torch
    import torch.distributed as dist

    indices = torch.tensor([[world.rank, world.rank + 1]])
    tensor = torch.sparse_coo_tensor(indices, mine(world.rank, 2), (4,))
    dist.all_reduce(tensor)
    same(tensor.to_dense(), torch.tensor([1.0, 2 + 11, 12, 0]))


@feature()
def all_reduce_coalesced(world: World) -> None:
    import torch.distributed as dist

    for async_op in (False, True):
        tensors = [mine(world.rank, 3), mine(world.rank, 5)]
        pending = dist.all_reduce_coalesced(tensors, async_op=async_op)
        if async_op:
            pending.wait()
        for tensor in tensors:
            same(tensor, everyone(world.size, len(tensor)).sum(0))


@feature()
def broadcast(world: World) -> None:
    import torch.distributed as dist

    for source in range(world.size):

        def call(async_op: bool, source: int = source) -> Any:
            tensor = mine(world.rank)
            work = dist.broadcast(tensor, source, async_op=async_op)
            return work, lambda: same(tensor, mine(source))

        both(call)


@feature()
def reduce(world: World) -> None:
    import torch.distributed as dist

    for root in range(world.size):

        def call(async_op: bool, root: int = root) -> Any:
            tensor = mine(world.rank)
            work = dist.reduce(tensor, root, async_op=async_op)
            return work, lambda: same(tensor, everyone(world.size).sum(0)) if world.rank == root else None

        both(call)


@feature()
def all_gather(world: World) -> None:
    import torch
    import torch.distributed as dist

    def call(async_op: bool) -> Any:
        parts = [torch.empty(6) for _ in range(world.size)]
        work = dist.all_gather(parts, mine(world.rank), async_op=async_op)
        return work, lambda: same(torch.stack(parts), everyone(world.size))

    both(call)


@feature()
def all_gather_into_tensor(world: World) -> None:
    import torch
    import torch.distributed as dist

    def call(async_op: bool) -> Any:
        whole = torch.empty(world.size * 6)
        work = dist.all_gather_into_tensor(whole, mine(world.rank), async_op=async_op)
        return work, lambda: same(whole, everyone(world.size).view(-1))

    both(call)


@feature()
def gather(world: World) -> None:
    import torch
    import torch.distributed as dist

    for root in range(world.size):

        def call(async_op: bool, root: int = root) -> Any:
            parts = [torch.empty(6) for _ in range(world.size)] if world.rank == root else None
            work = dist.gather(mine(world.rank), parts, root, async_op=async_op)
            return work, lambda: same(torch.stack(parts), everyone(world.size)) if parts is not None else None

        both(call)


@feature()
def scatter(world: World) -> None:
    import torch
    import torch.distributed as dist

    for root in range(world.size):

        def call(async_op: bool, root: int = root) -> Any:
            tensor = torch.empty(6)
            parts = list(everyone(world.size)) if world.rank == root else None
            work = dist.scatter(tensor, parts, root, async_op=async_op)
            return work, lambda: same(tensor, mine(world.rank))

        both(call)


@feature()
def reduce_scatter(world: World) -> None:
    import torch
    import torch.distributed as dist

    def call(async_op: bool) -> Any:
        part = torch.empty(3)
        work = dist.reduce_scatter(part, list(mine(world.rank).chunk(2)), async_op=async_op)
        return work, lambda: same(part, everyone(world.size).sum(0).chunk(2)[world.rank])

    both(call)


@feature()
def reduce_scatter_tensor(world: World) -> None:
    import torch
    import torch.distributed as dist

    def call(async_op: bool) -> Any:
        part = torch.empty(3)
        work = dist.reduce_scatter_tensor(part, mine(world.rank), async_op=async_op)
        return work, lambda: same(part, everyone(world.size).sum(0).chunk(2)[world.rank])

    both(call)


@feature()
def all_to_all(world: World) -> None:
    import torch
    import torch.distributed as dist

    def call(async_op: bool) -> Any:
        parts = [torch.empty(3) for _ in range(world.size)]
        work = dist.all_to_all(parts, list(mine(world.rank).chunk(2)), async_op=async_op)
        return work, lambda: same(torch.stack(parts), everyone(world.size).view(2, 2, 3)[:, world.rank])

    both(call)


@feature()
def all_to_all_single(world: World) -> None:
    import torch
    import torch.distributed as dist

    splits = [[1, 5], [4, 2]]  # by sender, then by receiver

    def call(async_op: bool) -> Any:
        theirs = [splits[rank][world.rank] for rank in range(2)]
        output = torch.empty(sum(theirs))
        work = dist.all_to_all_single(output, mine(world.rank), theirs, splits[world.rank], async_op=async_op)
        expected = [mine(rank).split(splits[rank])[world.rank] for rank in range(2)]
        return work, lambda: same(output, torch.cat(expected))

    both(call)


@feature()
def barrier(world: World) -> None:
    """Rank 1 sees what rank 0 wrote before it came."""
    import os
    import time

    import torch.distributed as dist

    for index, async_op in enumerate((False, True)):
        path = f"{world.folder}/came-{index}"
        if world.rank == 0:
            time.sleep(0.1)
            open(path, "w").close()
        work = dist.barrier(async_op=async_op)
        if async_op:
            work.wait()
        assert os.path.exists(path)


@feature()
def coalescing_manager(world: World) -> None:
    """Without a device: torch merges calls of one kind."""
    import torch
    import torch.distributed as dist

    for async_ops in (False, True):
        tensors = [mine(world.rank, 3), mine(world.rank, 4)]
        with dist._coalescing_manager(async_ops=async_ops) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        if async_ops:
            manager.wait()
        for tensor in tensors:
            same(tensor, everyone(world.size, len(tensor)).sum(0))
    outputs = [torch.empty(2 * 3), torch.empty(2 * 4)]
    with dist._coalescing_manager():
        for output in outputs:
            dist.all_gather_into_tensor(output, mine(world.rank, len(output) // 2))
    for output in outputs:
        same(output, everyone(world.size, len(output) // 2).view(-1))
    parts = [torch.empty(3), torch.empty(2)]
    with dist._coalescing_manager():
        for part in parts:
            dist.reduce_scatter_tensor(part, mine(world.rank, 2 * len(part)))
    for part in parts:
        same(part, everyone(world.size, 2 * len(part)).sum(0).chunk(2)[world.rank])


@feature()
def coalescing_manager_of_a_device(world: World) -> None:
    import torch
    import torch.distributed as dist

    tensors = [mine(world.rank, 3), mine(world.rank, 4)]
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    for tensor in tensors:
        same(tensor, everyone(world.size, len(tensor)).sum(0))


@feature()
def object_collectives(world: World) -> None:
    import torch.distributed as dist

    def of(rank: int) -> Any:
        return {"rank": rank, "text": "x" * (rank + 1) * 50}

    got: list[Any] = [None] * world.size
    dist.all_gather_object(got, of(world.rank))
    assert got == [of(rank) for rank in range(world.size)]
    at_one: list[Any] | None = [None] * world.size if world.rank == 1 else None
    dist.gather_object(of(world.rank), at_one, dst=1)
    assert at_one is None or at_one == got
    listed = [of(1), 7] if world.rank == 1 else [None, None]
    dist.broadcast_object_list(listed, src=1)
    assert listed == [of(1), 7]
    part: list[Any] = [None]
    dist.scatter_object_list(part, got if world.rank == 0 else None, src=0)
    assert part == [of(world.rank)]


@feature()
def boxed_operators(world: World) -> None:
    """`torch.ops.c10d` by hand, with the boxed group."""
    import torch
    import torch.distributed as dist

    group = dist.group.WORLD.boxed()
    operators = torch.ops.c10d

    def done(boxed: Any) -> None:
        dist.Work.unbox(boxed).wait()

    tensor = mine(world.rank)
    _, work = operators.broadcast_([tensor], group, 1, 0)
    done(work)
    same(tensor, mine(1))
    whole = torch.empty(world.size * 6)
    _, work = operators._allgather_base_(whole, mine(world.rank), group)
    done(work)
    same(whole, everyone(world.size).view(-1))
    parts = [torch.empty(6) for _ in range(world.size)]
    _, work = operators.allgather_([parts], [mine(world.rank)], group)
    done(work)
    same(torch.stack(parts), everyone(world.size))
    swapped = torch.empty(6)
    done(operators.alltoall_base_(swapped, mine(world.rank), group, [3, 3], [3, 3]))
    same(swapped, everyone(world.size).view(2, 2, 3)[:, world.rank].reshape(-1))
    done(operators.barrier(torch.empty(1), group, []))
    if hasattr(dist.ReduceOp, "boxed"):
        _, work = operators.allreduce_([tensor], group, dist.ReduceOp(dist.ReduceOp.SUM).boxed(), None)
        done(work)
        same(tensor, 2 * mine(1))
    tensor = mine(world.rank)
    if world.rank == 0:
        done(operators.send([tensor], group, 1, 3))
    else:
        done(operators.recv_([tensor], group, 0, 3))
    same(tensor, mine(0))
