"""Traps of torch for a backend in Python: one case for each workaround."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
from load import seconds
from worlds import BY_DISPATCHER, Case, check

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("torch_traps")]

MODES = ("auto",)
CASES: dict[str, Case] = {}


def case(function: Any) -> Any:
    CASES[function.__name__] = lambda dist, rank, size, folder: function(dist, rank, size)
    return function


@case
def trap_1_cpp_waits_for_a_python_work(dist: Any, rank: int, size: int) -> None:
    """Of a Python Work C++ sees `wait(timedelta)` and `get_future()` alone; the base class's wait() blocks for ever."""
    import torch

    functional = torch.ops._c10d_functional
    name = dist.group.WORLD.group_name
    for count in (3, 100_000):
        pending = functional.all_reduce(torch.full((count,), rank + 1.0), "sum", name)
        assert functional.wait_tensor(pending).eq(size * (size + 1) / 2).all()


@case
def trap_2_a_future_fails_by_a_callback_that_raised(dist: Any, rank: int, size: int) -> None:
    """DDP's reducer takes the process down over a Future that has an exception set."""
    import torch

    group = dist.new_group(timeout=timedelta(seconds=3))  # in which the group comes together, too
    if rank == 0:  # the other ranks never call
        future = dist.all_reduce(torch.ones(4), async_op=True, group=group).get_future()
        began = time.monotonic()
        try:
            future.wait()
        except RuntimeError as error:
            assert "(its timeout is 3.0 s)" in str(error), str(error)
        else:
            raise AssertionError("nothing was raised")
        assert time.monotonic() - began < seconds(8)
    dist.barrier()
    dist.destroy_process_group(group)


@case
def trap_3_a_callback_may_block_on_a_later_future(dist: Any, rank: int, size: int) -> None:
    import torch

    first = dist.all_reduce(torch.ones(50_000), async_op=True).get_future()
    second = dist.all_reduce(torch.ones(50_000), async_op=True).get_future()
    assert first.then(lambda _: second.wait()[0][0].item()).wait() == size


@case
def trap_4_compiled_code_reaches_the_group(dist: Any, rank: int, size: int) -> None:
    """Dynamo would compile the group's methods when C++ calls them."""
    import torch
    import torch.distributed._functional_collectives as functional

    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    compiled = torch.compile(ddp, backend="aot_eager")
    for _ in range(2):
        ddp.zero_grad()
        compiled(torch.full((2, 3), rank + 1.0)).sum().backward()
    assert ddp.module.weight.grad.eq(2 * sum(range(1, size + 1)) / size).all()
    world = dist.group.WORLD
    whole = {"backend": "aot_eager", "fullgraph": True}
    gather = torch.compile(lambda x: functional.all_gather_tensor(x * 2, 0, world) + 1, **whole)
    assert torch.equal(gather(torch.full((2,), float(rank))), torch.arange(size).repeat_interleave(2) * 2.0 + 1)
    summed = torch.compile(lambda x: functional.all_reduce(x + 1, "sum", world) * 2, **whole)
    assert summed(torch.ones(3)).eq(4 * size).all()


@case
def trap_5_a_boxed_work_is_the_python_one(dist: Any, rank: int, size: int) -> None:
    """A box of the C++ half alone would never return from wait()."""
    import torch

    tensor = torch.full((100_000,), rank + 1.0)
    box = dist.all_reduce(tensor, async_op=True).boxed()
    assert dist.Work.unbox(box).wait()
    assert tensor.eq(size * (size + 1) / 2).all()


@case
def trap_6_the_group_has_a_device_and_nothing_reaches_torchs_own_half(dist: Any, rank: int, size: int) -> None:
    """DCP's async_save refuses a group with no CPU backend; the one it sees trips on every collective."""
    import torch

    group = dist.group.WORLD
    assert torch.device("cpu") in group._device_types
    if BY_DISPATCHER:  # what is registered is netfold itself
        assert group._get_backend(torch.device("cpu")).name() == "netfold"
        return
    try:
        group._get_backend(torch.device("cpu")).allreduce([torch.ones(1)])
    except RuntimeError as error:
        assert "FakeProcessGroup" in str(error)
    else:
        raise AssertionError("a collective that passed by netfold was taken for done")


@case
def trap_7_operators_that_pass_by_the_groups_methods(dist: Any, rank: int, size: int) -> None:
    import torch

    functional = torch.ops._c10d_functional
    gloo = dist.new_group(backend="gloo")
    for group in (dist.group.WORLD, gloo):  # the operator is one for all groups
        out = torch.empty(size * 3)
        functional.wait_tensor(
            functional.all_gather_into_tensor_out(torch.full((3,), float(rank)), size, group.group_name, out=out)
        )
        assert torch.equal(out, torch.arange(size).repeat_interleave(3).float())
    whole = torch.arange(size * 2.0)
    out = torch.empty(2)
    name = dist.group.WORLD.group_name
    functional.wait_tensor(functional.reduce_scatter_tensor_out(whole, "sum", size, name, out=out))
    assert torch.equal(out, whole[rank * 2 : rank * 2 + 2] * size)
    dist.destroy_process_group(gloo)


@case
def trap_8_built_in_hooks_of_cpp(dist: Any, rank: int, size: int) -> None:
    """FP16_COMPRESS wants a Future of a list of tensors, which Python cannot make by itself."""
    import torch

    for hook in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
        ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
        ddp._register_builtin_comm_hook(hook)
        for _ in range(2):
            ddp.zero_grad()
            ddp(torch.full((2, 3), rank + 1.0)).sum().backward()
            assert ddp.module.weight.grad.eq(2 * sum(range(1, size + 1)) / size).all(), hook
    dist.barrier()


@case
def trap_9_cpp_waits_for_the_work_of_a_call_inside_a_coalescing_manager(dist: Any, rank: int, size: int) -> None:
    """C++ takes None for a Work that it can wait for, and ends the process."""
    import torch
    from torch.distributed.distributed_c10d import _coalescing_manager

    functional = torch.ops._c10d_functional
    name = dist.group.WORLD.group_name
    with _coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        pending = functional.all_reduce(torch.full((1000,), rank + 1.0), "sum", name)
        assert functional.wait_tensor(pending).eq(size * (size + 1) / 2).all()
    manager.wait()


@pytest.mark.parametrize("name", CASES)
def test_each_case_passes_on_every_rank(name: str) -> None:
    check(__name__, MODES, "auto", name)
