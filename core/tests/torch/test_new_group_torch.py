"""torch's new_group where its default group cannot serve as the parent."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import pytest
from ranks import run_ranks, values

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("torch_new_group")]


def after_a_death(rank: int, size: int, folder: str) -> int:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    store = FileStore(f"{folder}/store", size)
    dist.init_process_group("netfold", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:  # rank 1 may learn of the death while it makes the group
        with pytest.raises(RuntimeError, match="rank 2"):
            while True:
                dist.all_reduce(torch.ones(1000))
    group = dist.new_group([1, 0], use_local_synchronization=True)
    tensor = torch.tensor([rank + 1])
    dist.all_reduce(tensor, group=group)
    # Neither end waits for the other rank of a group.
    store.set(f"done {rank}", "")
    store.wait([f"done {1 - rank}"], timedelta(seconds=30))
    return int(tensor.item())


def test_survivors_of_the_default_group_go_on_over_the_store() -> None:
    assert values(run_ranks(after_a_death, 3, dies=[2])[:2]) == [3, 3]
