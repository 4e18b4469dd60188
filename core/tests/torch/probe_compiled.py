"""Features of `probe.py`: functional collectives, their gradients, and torch.compile."""

from __future__ import annotations

from typing import Any

from probe import World, feature
from probe_collectives import everyone, mine, same

FUNCTIONAL = ("torch.distributed._functional_collectives",)
DYNAMO = (*FUNCTIONAL, "torch._dynamo")
INDUCTOR = (*DYNAMO, "torch._inductor.compile_fx")
# A C++ compiler runs on each rank, beside whatever else the machine does.
INDUCTOR_DEADLINE_S = 180.0
# One compiler process a rank, whose folder is its own.
ALONE = (("TORCHINDUCTOR_COMPILE_THREADS", "1"), ("OMP_NUM_THREADS", "1"))


@feature(imports=FUNCTIONAL)
def functional_collectives(world: World) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional

    group = dist.group.WORLD
    whole, part = everyone(world.size), mine(world.rank)
    same(functional.all_reduce(part, "sum", group) + 0, whole.sum(0))
    same(functional.all_gather_tensor(part, 0, group) + 0, whole.view(-1))
    same(functional.reduce_scatter_tensor(part, "sum", 0, group) + 0, whole.sum(0).chunk(2)[world.rank])
    same(functional.broadcast(part, 1, group) + 0, whole[1])
    swapped = functional.all_to_all_single(part, [3, 3], [3, 3], group) + 0
    same(swapped, whole.view(2, 2, 3)[:, world.rank].reshape(-1))
    for got, count in zip(
        functional.all_reduce_coalesced([mine(world.rank, 2), mine(world.rank, 3)], "sum", group), (2, 3), strict=True
    ):
        same(got + 0, everyone(world.size, count).sum(0))
    gathered = functional.all_gather_into_tensor_coalesced([mine(world.rank, 2), mine(world.rank, 3)], group)
    for got, count in zip(gathered, (2, 3), strict=True):
        same(got + 0, everyone(world.size, count).view(-1))
    scattered = functional.reduce_scatter_tensor_coalesced(
        [mine(world.rank, 2), mine(world.rank, 4)], "sum", [0, 0], group
    )
    for got, count in zip(scattered, (2, 4), strict=True):
        same(got + 0, everyone(world.size, count).sum(0).chunk(2)[world.rank])
    assert isinstance(functional.wait_tensor(functional.all_reduce(part, "sum", group)), torch.Tensor)


@feature()
def functional_collectives_into_tensors(world: World) -> None:
    import torch
    import torch.distributed as dist

    operators = torch.ops._c10d_functional
    name = dist.group.WORLD.group_name
    out = torch.empty(12)
    operators.wait_tensor(operators.all_gather_into_tensor_out(mine(world.rank), 2, name, out=out))
    same(out, everyone(world.size).view(-1))
    tensor = mine(world.rank)
    operators.wait_tensor(operators.all_reduce_(tensor, "sum", name))
    same(tensor, everyone(world.size).sum(0))


@feature(imports=FUNCTIONAL)
def functional_gradients(world: World) -> None:
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional

    group = dist.group.WORLD
    weights = mine(world.rank, 12)
    part = mine(world.rank).requires_grad_()
    (functional.all_gather_tensor_autograd(part, 0, group) * weights).sum().backward()
    same(part.grad, everyone(world.size, 12).sum(0).chunk(2)[world.rank])
    whole = mine(world.rank, 12).requires_grad_()
    (functional.reduce_scatter_tensor_autograd(whole, "sum", 0, group) * mine(world.rank)).sum().backward()
    same(whole.grad, everyone(world.size).view(-1))
    moved = mine(world.rank).requires_grad_()
    (functional.all_to_all_single_autograd(moved, [3, 3], [3, 3], group) * mine(world.rank)).sum().backward()
    same(moved.grad, everyone(world.size).view(2, 2, 3)[:, world.rank].reshape(-1))


@feature()
def gradients_of_nn_functional(world: World) -> None:
    import torch
    import torch.distributed.nn.functional as functional

    part = mine(world.rank).requires_grad_()
    (functional.all_reduce(part) * mine(world.rank)).sum().backward()
    same(part.grad, everyone(world.size).sum(0))
    part = mine(world.rank).requires_grad_()
    (torch.stack(functional.all_gather(part)) * everyone(world.size)).sum().backward()
    same(part.grad, 2 * mine(world.rank))
    part = mine(world.rank).requires_grad_()
    (functional.broadcast(part, 0) * mine(world.rank)).sum().backward()
    if world.rank == 0:
        same(part.grad, everyone(world.size).sum(0))


def compiled_functional(world: World, backend: str) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional

    group = dist.group.WORLD

    def sums(x: Any) -> Any:
        return functional.all_reduce(x + 1, "sum", group) * 2

    def gathers(x: Any) -> Any:
        return functional.all_gather_tensor(x * 2, 0, group) + 1

    for function, expected in (
        (sums, 2 * (everyone(world.size) + 1).sum(0)),
        (gathers, 2 * everyone(world.size).view(-1) + 1),
    ):
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        for _ in range(2):
            same(compiled(mine(world.rank)), expected)


def compiled_calls(world: World, backend: str) -> None:
    """Dynamo turns `torch.distributed`'s own calls into functional ones."""
    import torch
    import torch.distributed as dist

    def sums(x: Any) -> Any:
        x = x + 1
        dist.all_reduce(x)
        return x * 2

    compiled = torch.compile(sums, backend=backend, fullgraph=True)
    same(compiled(mine(world.rank)), 2 * (everyone(world.size) + 1).sum(0))


def compiled_ddp(world: World, backend: str) -> None:
    import torch
    from probe_training import batch as samples
    from probe_training import close, gradients_alone, network

    ddp = torch.nn.parallel.DistributedDataParallel(network())
    compiled = torch.compile(ddp, backend=backend)
    for _ in range(2):
        ddp.zero_grad()
        compiled(samples(world.rank)).square().mean().backward()
        close([parameter.grad for parameter in ddp.parameters()], gradients_alone(world.size))


@feature(imports=DYNAMO, environment=ALONE, deadline_s=60.0)
def compiled_functional_collectives(world: World) -> None:
    compiled_functional(world, "aot_eager")
    compiled_calls(world, "aot_eager")


@feature(imports=DYNAMO, environment=ALONE, deadline_s=60.0)
def compiled_ddp_eager(world: World) -> None:
    compiled_ddp(world, "aot_eager")


def _own_cache(world: World) -> None:
    import os

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{world.folder}/inductor-{world.rank}"


@feature(imports=INDUCTOR, environment=ALONE, deadline_s=INDUCTOR_DEADLINE_S)
def inductor_functional_collectives(world: World) -> None:
    _own_cache(world)
    compiled_functional(world, "inductor")
    compiled_calls(world, "inductor")


@feature(imports=INDUCTOR, environment=ALONE, deadline_s=INDUCTOR_DEADLINE_S)
def inductor_ddp(world: World) -> None:
    _own_cache(world)
    compiled_ddp(world, "inductor")
