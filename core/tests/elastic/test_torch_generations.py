"""torch's default group takes a group that has formed already, generation after generation, without torch's store."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from ranks import run_ranks, values

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def enter(communicator: Any, number: int) -> None:
    """Make torch's default group of the generation; the store is this process's own: nobody else sees its keys."""
    import torch.distributed as dist

    from netfold.torch.factory import default_group_of

    store = dist.PrefixStore(f"generation {number}", dist.HashStore())
    with default_group_of(communicator.group):
        dist.init_process_group("netfold", store=store, rank=communicator.rank, world_size=communicator.size)


def check(rank: int, size: int) -> None:
    """The default group, groups of some ranks, a mesh, and DDP."""
    import torch.distributed as dist

    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    one = torch.full((3,), float(rank + 1))
    dist.all_reduce(one)
    assert one.tolist() == [size * (size + 1) / 2] * 3
    pairs = [[each, each + 1] for each in range(0, size - 1, 2)]
    group, _ = dist.new_subgroups_by_enumeration(pairs)
    if group is not dist.GroupMember.NON_GROUP_MEMBER and group is not None:
        one = torch.tensor([float(rank)])
        dist.all_reduce(one, group=group)
        assert one.item() == rank + (rank ^ 1)
    whole = dist.new_group()
    dist.barrier(whole)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (size,))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False), process_group=mesh.get_group())
    model(torch.full((1, 2), float(rank + 1))).sum().backward()
    assert model.module.weight.grad.tolist() == [[(size + 1) / 2] * 2]
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, rank)
    assert gathered == list(range(size))


def generations(rank: int, size: int, folder: str) -> None:
    import torch.distributed as dist

    from netfold.bootstrap.store import FileStore
    from netfold.communicator import Communicator

    torch.set_num_threads(1)
    communicator = Communicator(FileStore(folder), rank, size)
    enter(communicator, 1)
    check(rank, size)
    group = communicator.group
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        while True:
            dist.all_reduce(torch.ones(10))
    communicator.shrink([1])
    dist.destroy_process_group()
    enter(communicator, 2)
    assert communicator.group is not group
    check(communicator.rank, size - 1)
    # The next generation may also be formed while torch still holds the former one.
    communicator.reconfigure("third", communicator.handles)
    dist.destroy_process_group()
    enter(communicator, 3)
    check(communicator.rank, size - 1)
    communicator.barrier()
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="was closed"):  # torch's group has ended it
        communicator.barrier()
    communicator.close()
    del group
    # A later group of torch's own is not the communicator's.
    store = dist.FileStore(f"{folder}/torch", size - 1)
    dist.init_process_group("netfold", store=store, rank=0 if rank == 0 else rank - 1, world_size=size - 1)
    check(dist.get_rank(), size - 1)
    dist.destroy_process_group()


def test_torch_takes_each_generation() -> None:
    outcomes = run_ranks(generations, 5, timeout_s=120, dies=[1])
    values([each for rank, each in enumerate(outcomes) if rank != 1])


def another_rank(rank: int, size: int, folder: str) -> None:
    import torch.distributed as dist

    from netfold.bootstrap.store import FileStore
    from netfold.communicator import Communicator
    from netfold.torch.factory import default_group_of

    with Communicator(FileStore(folder), rank, size) as communicator:
        formed = pytest.raises(ValueError, match=r"is rank \d of 2 in the group that is formed")
        with formed, default_group_of(communicator.group):
            dist.init_process_group("netfold", store=dist.HashStore(), rank=1 - rank, world_size=size)
        communicator.barrier()


def test_another_rank_than_the_groups_is_refused() -> None:
    values(run_ranks(another_rank, 2, timeout_s=60))
