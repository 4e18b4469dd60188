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


def world_grows(rank: int, size: int, folder: str) -> None:
    """From a world of 1, as torch began it, to one of 3. What torch derives from a world's ranks follows."""
    import torch.distributed._functional_collectives as functional
    from torch.distributed.device_mesh import init_device_mesh

    os.mkdir(f"{folder}/{rank}")
    dist, _ = begin(0, 1, f"{folder}/{rank}", enable_reconfigure=True)
    store = dist.FileStore(f"{folder}/shared", -1)
    dist._reconfigure(1, exchange(dist, store, "all", rank, size), timeout=timedelta(seconds=30)).wait()
    assert dist.get_process_group_ranks(dist.group.WORLD) == [0, 1, 2]
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.options.global_ranks_in_group == [0, 1, 2]
    word = torch.tensor([float(rank)])
    dist.broadcast(word, src=2)
    assert word.item() == 2
    mesh = init_device_mesh("cpu", (3,))
    total = functional.wait_tensor(functional.all_reduce(torch.ones(2) * (rank + 1), "sum", mesh))
    assert total.tolist() == [6, 6] and mesh.get_local_rank() == rank
    dist.destroy_process_group()


def test_a_world_that_grows_has_the_global_ranks_of_its_new_size() -> None:
    values(run_ranks(world_grows, 3, timeout_s=120))


def subgroup_changes(rank: int, size: int, folder: str) -> None:
    """Members keep their global ranks, so that torch does not take the wrong root; a newcomer has none."""
    dist, store = begin(rank, size, folder)
    group = dist.new_group([0, 1, 2])
    if rank < 3:
        store.set(f"sub {rank}", dist._get_reconfigure_handle(group))
        first, _, last = (store.get(f"sub {peer}").decode() for peer in range(3))
        if rank != 1:
            dist._reconfigure(1, [first, last], group=group, timeout=timedelta(seconds=30)).wait()
            assert dist.get_process_group_ranks(group) == [0, 2]
            word = torch.tensor([float(rank)])
            dist.broadcast(word, src=2, group=group)
            assert word.item() == 2
            with pytest.raises(ValueError, match="Global rank 1 is not part of group"):
                dist.broadcast(word, src=1, group=group)
    store.set(f"left {rank}", "")
    if rank in (0, 3):  # rank 3 joins by its handle of the world
        handles = [store.get("sub 0").decode(), exchange_one(dist, store, rank)]
        own = group if rank == 0 else dist.group.WORLD
        store.get("left 2")
        dist._reconfigure(2, handles, group=own, timeout=timedelta(seconds=30)).wait()
        word = torch.tensor([float(rank)])
        dist.broadcast(word, group_src=1, group=own)
        assert word.item() == 3
        if rank == 0:
            assert dist.get_process_group_ranks(group) == [0]
            with pytest.raises(ValueError, match="Global rank 3 is not part of group"):
                dist.broadcast(word, src=3, group=group)
    store.set(f"done {rank}", "")
    for peer in range(size):
        store.get(f"done {peer}")
    dist.destroy_process_group()


def exchange_one(dist: Any, store: Any, rank: int) -> str:
    if rank == 3:
        store.set("newcomer", dist._get_reconfigure_handle())
    return str(store.get("newcomer").decode())


def test_members_of_a_subgroup_keep_their_global_ranks() -> None:
    values(run_ranks(subgroup_changes, 4, timeout_s=120))


def hints(rank: int, size: int, folder: str) -> None:
    import netfold.torch

    dist, store = begin(rank, size, folder, enable_reconfigure=True)
    handles = exchange(dist, store, "first", rank, size)
    wait = timedelta(seconds=30)
    with pytest.raises(ValueError, match="the hint NETFOLD_ALGORYTHM is no option of a group"):
        dist._reconfigure(1, handles, timeout=wait, hints={"NETFOLD_ALGORYTHM": "ring"})
    with pytest.raises(ValueError, match="NETFOLD_SPIN_US='often' is not a whole number"):
        dist._reconfigure(1, handles, timeout=wait, hints={"NETFOLD_SPIN_US": "often"})
    asked = {"NETFOLD_ALGORITHM": "all_reduce=ring", "ncclCollnetEnable": "1"}
    dist._reconfigure(1, handles, timeout=wait, hints=asked).wait()
    check(dist, rank, size)
    assert netfold.torch.why(size_bytes=1024).startswith("ring (NETFOLD_ALGORITHM=all_reduce=ring)")
    exchange(dist, store, "done", rank, size)
    dist.destroy_process_group()


def test_hints_are_options_of_the_next_group() -> None:
    values(run_ranks(hints, 2, timeout_s=120))


def aborts(rank: int, size: int, folder: str) -> list[str]:
    """Ask get_error after an own abort, after another rank's abort, and after a timeout."""
    dist, store = begin(rank, size, folder, enable_reconfigure=True)
    handles, found = exchange(dist, store, "first", rank, size), []
    for uuid in (1, 2):
        dist._reconfigure(uuid, handles, timeout=timedelta(seconds=30)).wait()
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        found.append(backend.get_error().name)
        if uuid == 1 and rank == 1:
            backend.abort()
        elif uuid == 1 or rank == 0:
            backend.set_timeout(timedelta(seconds=60 if uuid == 1 else 0.2))
            with pytest.raises(RuntimeError, match="abort" if uuid == 1 else "timed out"):
                while True:
                    dist.all_reduce(torch.ones(3))
        found.append(backend.get_error().name)
        exchange(dist, store, f"turn {uuid}", rank, size)
    dist.destroy_process_group()
    return found


def test_get_error_names_what_ended_the_group() -> None:
    first, second = values(run_ranks(aborts, 2, timeout_s=120))
    assert first == ["SUCCESS", "REMOTE_ERROR", "SUCCESS", "TIMEOUT"]
    assert second[:3] == ["SUCCESS", "SUCCESS", "SUCCESS"]


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
