"""Documented behaviour of torch.distributed beside the collectives: coalescing, meshes, threads, timeouts, ends."""

from __future__ import annotations

import inspect
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from load import seconds
from worlds import BY_DISPATCHER, Case, check

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("torch_semantics")]

MODES = ("auto",)
CASES: dict[str, Case] = {}


def case(function: Any) -> Any:
    CASES[function.__name__] = function
    return function


def raises(kind: type[BaseException], call: Any) -> BaseException:
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} was raised")


@case
def a_group_outside_the_world_ends_with_its_last_reference(dist: Any, rank: int, size: int, folder: str) -> None:
    import torch

    import netfold.torch

    store = dist.FileStore(f"{folder}/outside", size)
    group = netfold.torch.new_process_group(store, rank, size, timeout=timedelta(seconds=30))
    group.allreduce([torch.ones(3)]).wait()
    if rank == 1:
        del group
    else:
        error = raises(RuntimeError, lambda: group.allreduce([torch.ones(3)]).wait())
        assert "rank 1 closed the group" in str(error), str(error)
    dist.barrier()


@case
def results_may_overlap_inputs(dist: Any, rank: int, size: int, folder: str) -> None:
    import torch

    for count in (1, 20_000):
        whole = torch.arange(size * count) // count + 100 * rank
        dist.all_to_all_single(whole, whole)
        assert whole.tolist() == [100 * (at // count) + rank for at in range(size * count)]
        # Columns of one storage: the input is a column of the result.
        table = (torch.arange(count)[:, None] * size + torch.arange(size)) * 100 + rank
        dist.all_gather([table[:, other] for other in range(size)], table[:, (rank + 1) % size])
        for other in range(size):
            column = (torch.arange(count) * size + (other + 1) % size) * 100 + other
            assert torch.equal(table[:, other], column), (count, other)
    repeated = torch.zeros(1).expand(4)
    for call in (
        lambda: dist.broadcast(repeated, 0),
        lambda: dist.all_reduce(repeated),
        lambda: dist.all_gather([repeated] * size, torch.ones(4)),
    ):
        assert "repeats elements" in str(raises(ValueError, call))
    same = torch.zeros(4)
    assert "two of the outputs overlap" in str(
        raises(ValueError, lambda: dist.all_gather([same] * size, torch.ones(4)))
    )
    dist.barrier()


@case
def the_coalescing_manager_makes_one_operation_of_several(dist: Any, rank: int, size: int, folder: str) -> None:
    import torch
    from torch.distributed import _coalescing_manager

    total = size * (size + 1) / 2
    for asynchronous in (False, True):
        tensors = [torch.full((count,), rank + 1.0) for count in (1, 0, 70_000)]
        with _coalescing_manager(async_ops=asynchronous) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        manager.wait()
        assert all(tensor.eq(total).all() for tensor in tensors)

        wholes, parts = [torch.ones(size * count) for count in (2, 300)], [torch.empty(count) for count in (2, 300)]
        with _coalescing_manager(async_ops=asynchronous) as manager:
            for whole, part in zip(wholes, parts, strict=True):
                dist.reduce_scatter_tensor(part, whole)
        manager.wait()
        assert all(part.eq(size).all() for part in parts)
        with _coalescing_manager(async_ops=asynchronous) as manager:
            for whole, part in zip(wholes, parts, strict=True):
                dist.all_gather_into_tensor(whole, part)
        manager.wait()
        assert all(whole.eq(size).all() for whole in wholes)

        # With a device the manager leaves it to the backend: any operations, none of which waits before the end.
        mixed, gathered = torch.full((6, 2), float(rank)), [torch.empty(9) for _ in range(size)]
        with _coalescing_manager(device=torch.device("cpu"), async_ops=asynchronous) as manager:
            dist.broadcast(mixed[:, 0], 2)  # staged: copied back at the end
            dist.all_gather(gathered, torch.full((9,), float(rank)))
            dist.reduce(mixed[0], 1)
        manager.wait()
        assert mixed[1:, 0].eq(2).all() and mixed[1:, 1].eq(rank).all()
        assert torch.equal(torch.stack(gathered)[:, 0], torch.arange(float(size)))


@case
def functional_collectives_in_all_forms(dist: Any, rank: int, size: int, folder: str) -> None:
    import torch

    functional, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
    wait = functional.wait_tensor
    own, total = torch.full((4,), rank + 1.0), size * (size + 1) / 2
    assert wait(functional.all_reduce(own, "sum", name)).eq(total).all()
    assert own.eq(rank + 1).all(), "out of place"
    assert wait(functional.all_reduce(own, "avg", name)).eq(total / size).all()
    assert wait(functional.all_reduce_(own.clone(), "max", name)).eq(size).all()
    assert all(wait(each).eq(total).all() for each in functional.all_reduce_coalesced([own, own[:1]], "sum", name))
    ranks = torch.arange(1.0, size + 1).repeat_interleave(4)
    assert torch.equal(wait(functional.all_gather_into_tensor(own, size, name)), ranks)
    gathered = functional.all_gather_into_tensor_coalesced([own, own[:1]], size, name)
    assert torch.equal(wait(gathered[0]), ranks) and torch.equal(wait(gathered[1]), ranks[::4])
    assert wait(functional.reduce_scatter_tensor(ranks, "sum", size, name)).eq(size * (rank + 1)).all()
    scattered = functional.reduce_scatter_tensor_coalesced([ranks, ranks], "sum", size, name)
    assert all(wait(each).eq(size * (rank + 1)).all() for each in scattered)
    splits = [1] * size
    assert torch.equal(wait(functional.all_to_all_single(own[:size], splits, splits, name)), ranks[::4])
    assert wait(functional.broadcast(own, 2, name)).eq(3).all() and own.eq(rank + 1).all()


@case
def meshes_of_two_and_three_dimensions(dist: Any, rank: int, size: int, folder: str) -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for name, members in (("replicate", (rank % 2, rank % 2 + 2)), ("shard", (rank // 2 * 2, rank // 2 * 2 + 1))):
        group = mesh[name].get_group()
        assert dist.get_backend(group) == "netfold"
        tensor = torch.tensor([rank])
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == sum(members)
    cube = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pipe", "data", "tensor"))
    tensor = torch.tensor([rank])
    dist.all_reduce(tensor, group=cube["tensor"].get_group())
    dist.all_reduce(tensor, group=cube["data"].get_group())
    dist.all_reduce(tensor, group=cube["pipe"].get_group())
    assert tensor.item() == sum(range(size))
    flat = cube["pipe", "tensor"]._flatten("both").get_group()
    dist.all_reduce(tensor, group=flat)
    assert tensor.item() == size * sum(range(size))


@case
def groups_of_one_name_do_not_meet(dist: Any, rank: int, size: int, folder: str) -> None:
    """Found by torch's suite: it names groups by counting calls, and ranks that make groups of a group count alike."""
    import torch

    mine = [[0, 2], [1, 3]][rank % 2]
    group = dist.new_group(mine, use_local_synchronization=True)
    alone, singles = dist.new_subgroups(group_size=1, group=group)
    tensor = torch.tensor([rank])
    dist.all_reduce(tensor, group=alone)
    assert tensor.item() == rank
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == sum(mine)
    for each in (*singles, group):
        dist.destroy_process_group(each)
    dist.barrier()


@case
def a_group_of_the_worlds_ranks_asks_no_store(dist: Any, rank: int, size: int, folder: str) -> None:
    import torch

    from netfold.torch import factory

    def ask(*_: Any) -> Any:
        raise AssertionError("netfold asked the store")

    store_of_torch = factory.TorchStore
    factory.TorchStore = ask  # type: ignore[assignment, misc]
    try:
        everyone = dist.new_group()
        ends = dist.new_group([size - 1, 0])
    finally:
        factory.TorchStore = store_of_torch  # type: ignore[misc]
    for group, ranks in ((everyone, range(size)), (ends, (0, size - 1))):
        if rank in ranks:
            tensor = torch.tensor([rank])
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == sum(ranks)
            dist.destroy_process_group(group)
    dist.barrier()


@case
def several_groups_are_used_from_several_threads(dist: Any, rank: int, size: int, folder: str) -> None:
    import torch

    groups = [dist.new_group() for _ in range(4)]
    wrong: list[Any] = []

    def use(index: int) -> None:
        try:
            for turn in range(30):
                tensor = torch.full((1 + 500 * turn,), float(index + turn))
                work = dist.all_reduce(tensor, group=groups[index], async_op=turn % 3 == 0)
                if work is not None:
                    work.wait()
                assert tensor.eq(size * (index + turn)).all()
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=use, args=(index,)) for index in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds(60))
    assert not wrong and not any(thread.is_alive() for thread in threads), wrong
    for group in groups:
        dist.destroy_process_group(group)


@case
def a_work_that_says_it_is_completed_has_its_result_in_place(dist: Any, rank: int, size: int, folder: str) -> None:
    import torch

    for _ in range(50):
        staged = torch.zeros(20_000, 2)
        staged[:, 1] = rank
        work = dist.all_reduce(staged[:, 1], async_op=True)
        while not work.is_completed():
            time.sleep(0)
        assert staged[:, 1].eq(sum(range(size))).all()


@case
def ranks_that_mean_different_dtypes_hear_of_it(dist: Any, rank: int, size: int, folder: str) -> None:
    import torch

    group = dist.new_group()
    tensor = torch.ones(8, dtype=torch.int32 if rank == 1 else torch.float32)
    gathered = [torch.empty_like(tensor) for _ in range(size)]
    error = raises(RuntimeError, lambda: dist.all_gather(gathered, tensor, group=group))
    assert "i32" in str(error) and "f32" in str(error), str(error)
    dist.destroy_process_group(group)
    dist.barrier()


@case
def ranks_whose_small_tensors_have_other_sizes_hear_of_it(dist: Any, rank: int, size: int, folder: str) -> None:
    """The sums of the sizes are equal, and so is the memory that travels."""
    import torch

    for blocks in (False, True):
        group = dist.new_group(backend="netfold")
        counts = [5, 3] if rank == 1 else [3, 5]
        tensors = [torch.ones(count) for count in counts]
        with pytest.raises(RuntimeError, match="digest of all sizes"):
            if blocks:
                group.allgather([[torch.empty_like(tensor) for _ in range(size)] for tensor in tensors], tensors).wait()
            else:
                dist.all_reduce_coalesced(tensors, group=group)
            dist.barrier(group)
        dist.destroy_process_group(group)


@case
def a_group_and_an_operation_have_timeouts_of_their_own(dist: Any, rank: int, size: int, folder: str) -> None:
    import torch

    asked = ["new_group", "set_timeout"]
    if "timeout" in inspect.signature(dist.barrier).parameters:  # torch 2.10 has none
        asked.append("barrier")
    for ask in asked:
        group = dist.new_group(timeout=timedelta(seconds=0.4 if ask == "new_group" else 300))
        if ask == "set_timeout":
            group.set_timeout(timedelta(seconds=0.4))
        if rank == 0:
            began = time.monotonic()
            if ask == "barrier":
                error = raises(RuntimeError, lambda g=group: dist.barrier(g, timeout=timedelta(seconds=0.4)))
            else:
                error = raises(RuntimeError, lambda g=group: dist.all_reduce(torch.ones(1), group=g))
            assert "(its timeout is 0.4 s)" in str(error) and isinstance(error, TimeoutError), str(error)
            assert f"called at {__file__}:" in str(error), "the user's line, not one of torch's or netfold's"
            assert 0.4 <= time.monotonic() - began < seconds(5)
        dist.barrier()
        dist.destroy_process_group(group)


@case
def waiting_for_less_than_the_operation_takes_is_no_failure_of_it(dist: Any, rank: int, size: int, folder: str) -> None:
    import torch

    tensor = torch.ones(10)
    if rank == 3:
        time.sleep(0.5)
    work = dist.all_reduce(tensor, async_op=True)
    if rank != 3:
        raises(TimeoutError, lambda: work.wait(timedelta(seconds=0.05)))
    work.wait()
    assert tensor.eq(size).all()


@case
def monitored_barrier_names_all_who_are_missing(dist: Any, rank: int, size: int, folder: str) -> None:
    import netfold.torch

    netfold.torch.monitored_barrier()
    netfold.torch.monitored_barrier(timeout=30.0, wait_all_ranks=True)
    for wait_all_ranks in (False, True):
        group = dist.new_group()
        if rank < 2:
            began = time.monotonic()
            error = raises(
                RuntimeError,
                lambda g=group, w=wait_all_ranks: netfold.torch.monitored_barrier(g, timedelta(seconds=0.5), w),
            )
            assert isinstance(error, TimeoutError) and "2, 3" in str(error), str(error)
            assert error.rank == 2  # type: ignore[attr-defined]
            assert time.monotonic() - began < seconds(5)
        dist.barrier()
        dist.destroy_process_group(group)
    group = dist.new_group()
    if rank != 0:  # also without rank 0, which would tell
        error = raises(RuntimeError, lambda: netfold.torch.monitored_barrier(group, 0.3))
        assert "rank 0 did not reach it" in str(error), str(error)
    dist.barrier()
    raises(ValueError, lambda: netfold.torch.monitored_barrier(dist.new_group(backend="gloo")))


@case
def a_group_may_be_aborted_while_somebody_waits(dist: Any, rank: int, size: int, folder: str) -> None:
    import torch

    for how in ("abort", "shutdown"):
        group = dist.new_group()
        if rank == 0:
            began = time.monotonic()
            threading.Timer(0.2, getattr(group, how)).start()
            error = raises(RuntimeError, lambda g=group: dist.all_reduce(torch.ones(5), group=g))
            assert "rank 0" in str(error), str(error)
            assert time.monotonic() - began < seconds(5)
        dist.barrier()
        if rank != 0:
            # Rank 0's part of the first may have been on its way.
            error = raises(RuntimeError, lambda g=group: [dist.all_reduce(torch.ones(5), group=g) for _ in range(2)])
            assert "rank 0" in str(error), str(error)
        dist.barrier()
        dist.destroy_process_group(group)


@case
def other_devices_keep_their_backends(dist: Any, rank: int, size: int, folder: str) -> None:
    """`cpu:netfold,cuda:nccl`, with torch's fake backend for meta tensors in place of a GPU's."""
    import torch
    from torch.testing._internal.distributed import fake_pg

    assert fake_pg, "importing it registers the backend"

    if BY_DISPATCHER:
        two_backends_of_others_are_refused(dist)
        group = dist.new_group(backend="cpu:netfold,cuda:gloo")
        assert group._get_backend(torch.device("cuda")).name() == "gloo"
        tensor = torch.full((3,), rank + 1.0)
        dist.all_reduce(tensor, group=group)
        assert tensor.eq(size * (size + 1) / 2).all() and len(netfold_events(group)) == 1
        dist.destroy_process_group(group)
        return
    # Before 2.11 no collective of torch's takes tensors on "meta", for which a fake backend can be had.
    takes_meta = torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "Meta")
    for config in ("cpu:netfold,meta:fake", "meta:fake,cpu:netfold") if takes_meta else ():
        group = dist.new_group(backend=config)
        assert {device.type for device in group._device_types} == {"cpu", "meta"}
        tensor, elsewhere = torch.full((3,), rank + 1.0), torch.ones(3, device="meta")
        dist.all_reduce(tensor, group=group)
        assert tensor.eq(size * (size + 1) / 2).all()
        dist.all_reduce(elsewhere, group=group)
        dist.all_gather([torch.empty_like(elsewhere) for _ in range(size)], elsewhere, group=group)
        dist.all_gather_into_tensor(torch.empty(3 * size, device="meta"), elsewhere, group=group)
        dist.barrier(group=group)
        assert len(netfold_events(group)) == 2, "all_reduce of the CPU tensor and the barrier; nothing else"
        dist.destroy_process_group(group)


def two_backends_of_others_are_refused(dist: Any) -> None:
    """torch keeps one backend of each type in a group; its fake backend has the type of all that are not its own."""
    try:
        dist.new_group(backend="meta:fake,cpu:netfold")
    except ValueError as error:
        assert "cannot share a process group" in str(error), str(error)
    else:
        raise AssertionError("the group would give CPU tensors to the fake backend")


def netfold_events(group: Any) -> Any:
    import netfold.torch

    return netfold.torch.events(group)


@case
def without_a_gpu_a_group_has_nothing_for_one(dist: Any, rank: int, size: int, folder: str) -> None:
    import torch

    import netfold.torch
    from netfold.torch.operations import operations_of

    if not torch.cuda.is_available():
        assert operations_of(dist.group.WORLD).devices is None
        assert BY_DISPATCHER or {device.type for device in dist.group.WORLD._device_types} == {"cpu"}
        assert netfold.torch.device_paths() == "IPC disabled because torch finds no CUDA device here"


@case
def a_groups_methods_take_torchs_shorter_forms(dist: Any, rank: int, size: int, folder: str) -> None:
    import torch

    group = dist.group.WORLD
    tensor = torch.full((3,), rank + 1.0)
    group.allreduce(tensor).wait()
    assert tensor.eq(size * (size + 1) / 2).all()
    group.allreduce([tensor], dist.ReduceOp.MAX).wait()
    assert tensor.eq(size * (size + 1) / 2).all()
    tensor.fill_(rank)
    group.broadcast(tensor, 2).wait()
    assert tensor.eq(2).all()
    gathered = [torch.empty(3) for _ in range(size)]
    group.allgather(gathered, tensor + rank).wait()
    assert torch.equal(torch.stack(gathered)[:, 0], torch.arange(float(size)) + 2)
    group.barrier().wait()


@case
def operations_show_in_torchs_profiler(dist: Any, rank: int, size: int, folder: str) -> None:
    import torch

    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(torch.ones(3, 4))
        dist.broadcast(torch.ones(5), 0)
    shapes = {event.name: event.input_shapes for event in profile.function_events if event.name.startswith("netfold")}
    assert shapes == {"netfold:all_reduce": [[3, 4]], "netfold:broadcast": [[5]]}, shapes


@pytest.mark.parametrize("name", CASES)
def test_each_case_passes_on_every_rank(name: str) -> None:
    check(__name__, MODES, "auto", name)
