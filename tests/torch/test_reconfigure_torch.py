"""torch 2.15's `_reconfigure` and `shrink_group`: ranks leave and join, and torch's C++ knows the new rank and size."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

import pytest
from ranks import run_ranks, values

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    not hasattr(torch.distributed.distributed_c10d, "_reconfigure"), reason="this torch has no reconfigure"
)


def begin(rank: int, size: int, folder: str, **options: Any) -> tuple[Any, Any]:
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", -1)
    dist.init_process_group("netfold", store=store, rank=rank, world_size=size, **options)
    return dist, store


def exchange(dist: Any, store: Any, name: str, rank: int, size: int) -> list[str]:
    """All ranks' handles. Also a barrier."""
    store.set(f"{name} {rank}", dist._get_reconfigure_handle())
    return [store.get(f"{name} {peer}").decode() for peer in range(size)]


def check(dist: Any, rank: int, size: int) -> None:
    """By torch's Python, by its C++ (DDP divides by the size), and by values."""
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    one = torch.full((3,), float(rank + 1))
    dist.all_reduce(one)
    assert one.tolist() == [size * (size + 1) / 2] * 3
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    model(torch.full((1, 2), float(rank + 1))).sum().backward()
    assert model.module.weight.grad.tolist() == [[(size + 1) / 2] * 2]


def leave_and_join(rank: int, size: int, folder: str) -> str:
    dist, store = begin(rank, size, folder, enable_reconfigure=True)
    with pytest.raises(RuntimeError, match="in no group"):
        dist.all_reduce(torch.ones(1))
    handles = exchange(dist, store, "first", rank, size)
    wait = timedelta(seconds=30)
    if rank < 2:
        dist._reconfigure(1, [handles[1], handles[0]], timeout=wait).wait()
        check(dist, 1 - rank, 2)
        with pytest.raises(RuntimeError, match="the uuid 1 was already used"):
            dist._reconfigure(1, [handles[1], handles[0]])
    assert exchange(dist, store, "second", rank, size) == handles
    dist._reconfigure(2, set(handles), timeout=wait).wait()
    check(dist, sorted(handles).index(handles[rank]), size)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    backend.abort()  # the way to end operations that hang; the handle stays
    exchange(dist, store, "third", rank, size)
    dist._reconfigure(3, handles, timeout=wait).wait()
    check(dist, rank, size)
    exchange(dist, store, "done", rank, size)
    dist.destroy_process_group()
    return handles[rank]


def test_ranks_leave_and_join() -> None:
    assert len(set(values(run_ranks(leave_and_join, 3, timeout_s=120)))) == 3


def shrink(rank: int, size: int, folder: str) -> None:
    dist, store = begin(rank, size, folder)
    check(dist, rank, size)
    exchange(dist, store, "ready", rank, size)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        while True:
            dist.all_reduce(torch.ones(10))
    shrunk = dist.shrink_group([1])
    assert dist.group.WORLD is shrunk and shrunk.rank() == shrunk._get_backend(torch.device("cpu")).rank()
    check(dist, 0 if rank == 0 else 1, 2)
    store.set(f"done {rank}", "")
    store.get(f"done {2 - rank}")
    dist.destroy_process_group()


def test_shrink_group_after_a_death() -> None:
    outcomes = run_ranks(shrink, 3, timeout_s=120, dies=[1])
    values([outcomes[0], outcomes[2]])
