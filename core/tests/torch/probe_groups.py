"""Features of `probe.py`: groups, meshes, deadlines and ends."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from probe import AbsentError, World, feature, refused
from probe_collectives import everyone, mine, same

MESH = ("torch.distributed.device_mesh",)


def summed(world: World, group: Any = None, ranks: tuple[int, ...] = (0, 1)) -> None:
    """An all_reduce of `ranks` gives their sum."""
    import torch.distributed as dist

    tensor = mine(world.rank)
    dist.all_reduce(tensor, group=group)
    same(tensor, sum(mine(rank) for rank in ranks))


@feature()
def group_attributes(world: World) -> None:
    import torch
    import torch.distributed as dist

    group = dist.new_group([1, 0], group_desc="mine")
    assert dist.get_backend(group) == world.backend
    # A group's own name is that of its backend's type: of a backend that is not torch's, custom.
    assert group.name() in (world.backend, "custom"), group.name()
    assert group.group_desc == "mine" and group.group_name
    assert dist.get_process_group_ranks(group) == [0, 1]
    assert (group.rank(), group.size()) == (world.rank, world.size)
    assert group._device_types and torch.device("cpu") in group._device_types
    assert group._get_backend(torch.device("cpu")).size() == world.size
    assert "cpu" in dist.get_backend_config(group)
    group.get_group_store().set(f"rank {world.rank}", "here")
    assert group.get_group_store().get(f"rank {1 - world.rank}") == b"here"


@feature()
def new_group(world: World) -> None:
    import torch.distributed as dist

    alone = dist.new_group([1])
    if world.rank == 1:
        summed(world, alone, (1,))
    else:
        assert alone is dist.GroupMember.NON_GROUP_MEMBER
    again = dist.new_group([0, 1], timeout=timedelta(seconds=10))
    summed(world, again)
    dist.destroy_process_group(again)
    summed(world)


@feature()
def new_group_with_local_synchronization(world: World) -> None:
    import torch.distributed as dist

    summed(world, dist.new_group([0, 1], timeout=timedelta(seconds=10), use_local_synchronization=True))
    if world.rank == 1:
        summed(world, dist.new_group([1], timeout=timedelta(seconds=10), use_local_synchronization=True), (1,))


@feature()
def new_subgroups(world: World) -> None:
    import torch.distributed as dist

    group, groups = dist.new_subgroups(group_size=1)
    assert len(groups) == 2
    summed(world, group, (world.rank,))
    group, groups = dist.new_subgroups_by_enumeration([[0], [1]])
    summed(world, group, (world.rank,))


@feature()
def split_group(world: World) -> None:
    import torch.distributed as dist

    part = dist.split_group(split_ranks=[[0], [1]])
    summed(world, part, (world.rank,))
    whole = dist.split_group(split_ranks=[[0, 1]], group_desc="whole", timeout=timedelta(seconds=10))
    summed(world, whole)
    assert dist.get_process_group_ranks(whole) == [0, 1]


@feature()
def split_group_of_one_part(world: World) -> None:
    """The ranks outside of every part get no group."""
    import torch.distributed as dist

    part = dist.split_group(split_ranks=[[1]])
    if world.rank == 1:
        summed(world, part, (1,))
    else:
        assert part is None or part is dist.GroupMember.NON_GROUP_MEMBER, part


@feature()
def shrink_group(world: World) -> None:
    import torch.distributed as dist

    if not hasattr(dist, "shrink_group"):
        raise AbsentError("no shrink_group")
    summed(world)
    if world.rank == 0:
        left = dist.shrink_group([1])
        assert left.size() == 1
        summed(world, left, (0,))


@feature(grouped=False)
def reconfigure(world: World) -> None:
    """The group is made anew of the ranks whose handles are listed, without a new process."""
    import torch.distributed as dist

    if not hasattr(dist.distributed_c10d, "_reconfigure"):
        raise AbsentError("no reconfigure")
    world.init(enable_reconfigure=True)
    assert dist.distributed_c10d._supports_reconfigure(), "the backend reports no support"
    handle = dist.distributed_c10d._get_reconfigure_handle()
    store = dist.distributed_c10d._get_default_store()
    store.set(f"handle {world.rank}", handle)
    handles = [store.get(f"handle {rank}").decode() for rank in range(world.size)]
    dist.distributed_c10d._reconfigure(1, handles, timeout=timedelta(seconds=10)).wait()
    summed(world)


@feature(imports=MESH)
def mesh_of_one_dimension(world: World) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    assert mesh.get_rank() == world.rank
    summed(world, mesh.get_group("data"))


@feature(imports=MESH)
def mesh_of_two_dimensions(world: World) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    summed(world, mesh["replicate"].get_group())
    summed(world, mesh.get_group("shard"), (world.rank,))
    summed(world, mesh["replicate", "shard"]._flatten().get_group())


@feature(grouped=False, imports=MESH)
def device_id(world: World) -> None:
    """`init_process_group(device_id=)`, and meshes of such a group: torch splits it."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    world.init(device_id=torch.device("cpu", 0))
    summed(world)
    assert dist.group.WORLD.bound_device_id == torch.device("cpu", 0)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    summed(world, mesh.get_group("replicate"))
    summed(world, dist.new_group([0, 1]))


@feature(grouped=False)
def backend_by_device(world: World) -> None:
    """`cpu:x,meta:fake`: torch's fake backend stands for that of a device."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed import fake_pg

    assert fake_pg, "importing it registers the backend"
    for config in (f"cpu:{world.backend},meta:fake", f"meta:fake,cpu:{world.backend}"):
        world.init(backend=config)
        summed(world)
        dist.all_reduce(torch.ones(3, device="meta"))
        summed(world, dist.new_group([0, 1]))
        kinds = {device.type for device in dist.group.WORLD._device_types}
        assert {"cpu", "meta"} <= kinds, kinds
        dist.destroy_process_group()


@feature(grouped=False)
def backend_by_device_beside_gloo(world: World) -> None:
    """`cpu:x,cuda:gloo`: each device's backend is the one that was asked for."""
    import torch
    import torch.distributed as dist

    world.init(backend=f"cpu:{world.backend},cuda:gloo")
    summed(world)
    group = dist.new_group([0, 1])
    summed(world, group)
    assert group._get_backend(torch.device("cuda")).name() == "gloo"


@feature(grouped=False)
def init_by_store(world: World) -> None:
    import torch.distributed as dist

    store = dist.FileStore(f"{world.folder}/store", world.size)
    world.init(store=dist.PrefixStore("a part", store))
    summed(world)


@feature(grouped=False)
def destroy_and_init_again(world: World) -> None:
    import torch.distributed as dist

    for _ in range(3):
        world.init()
        summed(world)
        dist.destroy_process_group()


@feature()
def abort(world: World) -> None:
    """Ends the groups while an operation waits for the other rank; the process can make another world."""
    import torch
    import torch.distributed as dist

    if world.rank == 0:
        dist.all_reduce(torch.ones(4), async_op=True)
    dist.distributed_c10d._abort_process_group()
    world.init()
    summed(world)


@feature(grouped=False)
def timeout_of_a_group(world: World) -> None:
    import torch
    import torch.distributed as dist

    world.init(timeout=timedelta(seconds=1))
    if world.rank == 0:
        began = time.monotonic()
        with refused("timed out", "timeout", "did not finish"):
            dist.all_reduce(torch.ones(4))
        assert time.monotonic() - began < 10
    else:
        time.sleep(2)


@feature()
def set_timeout(world: World) -> None:
    """torch's own function changes a group's deadline."""
    import torch
    import torch.distributed as dist

    change = getattr(dist.distributed_c10d, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    change(timedelta(seconds=1))
    if world.rank == 0:
        began = time.monotonic()
        with refused("timed out", "timeout", "did not finish"):
            dist.all_reduce(torch.ones(4))
        assert time.monotonic() - began < 10
    else:
        time.sleep(2)


@feature()
def monitored_barrier(world: World) -> None:
    """`torch.distributed.monitored_barrier` names the rank that did not come."""
    import torch.distributed as dist

    dist.monitored_barrier(timeout=timedelta(seconds=10))
    if world.rank == 0:
        with refused("rank 1", "ranks 1", "[1]", "ranks: 1"):
            dist.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=True)


@feature(environment=(("TORCH_DISTRIBUTED_DEBUG", "DETAIL"),), grouped=False)
def debug_detail(world: World) -> None:
    """`TORCH_DISTRIBUTED_DEBUG=DETAIL`: collectives work, a mismatch is an error."""
    import torch
    import torch.distributed as dist

    dist.set_debug_level_from_env()
    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    world.init(timeout=timedelta(seconds=5))
    summed(world)
    dist.barrier()
    with refused("mismatch", "shape", "size", "elements", "differ", "calls"):
        dist.all_reduce(torch.ones(4 + world.rank))


@feature(environment=(("TORCH_DISTRIBUTED_DEBUG", "DETAIL"),), grouped=False)
def debug_detail_ddp(world: World) -> None:
    import torch
    import torch.distributed as dist

    dist.set_debug_level_from_env()
    world.init()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    model(torch.ones(2, 3)).sum().backward()
    assert model.module.weight.grad.eq(2).all()


@feature()
def two_threads(world: World) -> None:
    """Two threads of a process call, each in a group of its own."""
    import threading

    import torch.distributed as dist

    groups = [dist.new_group(), dist.new_group()]
    errors: list[BaseException] = []

    def calls(group: Any) -> None:
        try:
            for _ in range(50):
                summed(world, group)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=calls, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error
    same(mine(0), everyone(2)[0])


@feature()
def window(world: World) -> None:
    """One-sided operations: they work, or the error names the backend."""
    import torch
    import torch.distributed as dist

    make = getattr(dist.distributed_c10d, "_new_window", None)
    if make is None:
        raise AbsentError("no windows")
    if dist.distributed_c10d._supports_window():
        made = make(torch.empty(4))
        made.put(torch.full((4,), float(world.rank)), 1 - world.rank, 0, False)
        return
    with refused(world.backend):
        make(torch.empty(4))
