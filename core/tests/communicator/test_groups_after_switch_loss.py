"""Groups that form after their switch was lost: they use host algorithms, as the group before them does."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from load import seconds
from ranks import RunningSwitch, run_ranks, running_switch, values
from test_reconfigure import check_sum, exchange, outside

from netfold import Communicator, FileStore, Options
from netfold.communicator import SwitchError

RANKS = 3
REASON = "this group goes on without its switch: "


def in_network(endpoint: str) -> Options:
    return Options(probe="off", transport="tcp", switch=endpoint, algorithm="in_network")


def whose_switch_dies(rank: int, size: int, folder: str, endpoint: str, switch_pid: int) -> Communicator:
    """A group that goes on by host algorithms."""
    options = in_network(endpoint)
    group = Communicator(FileStore(folder), rank, size, options=options, timeout_s=30, join_timeout_s=30)
    check_sum(group)
    exchange(folder, "summed", rank, size)
    if rank == 0:
        os.kill(switch_pid, signal.SIGKILL)
    check_sum(group)
    return group


def check_without_switch(group: Communicator) -> None:
    check_sum(group)
    assert group.group.membership is None
    assert REASON in group.group.why("all_reduce", 1 << 20)


def later_groups(rank: int, size: int, folder: str, endpoint: str, switch_pid: int) -> None:
    with whose_switch_dies(rank, size, folder, endpoint, switch_pid) as group:
        part = group.split(0 if rank < 2 else None)
        if part is not None:
            with part:
                check_without_switch(part)
                with pytest.raises(SwitchError, match="refused the connection"):
                    part.split(0, options=in_network("127.0.0.1:9"))
        handles = group.handles
        newcomer = outside(in_network(endpoint))
        with newcomer:
            handles = tuple(exchange(folder, "handles", rank, size, newcomer.handle if rank == 2 else group.handle))
            member = newcomer if rank == 2 else group
            member.reconfigure("with a newcomer", handles)
            check_without_switch(member)
            exchange(folder, "newcomer", rank, size)
            if rank < 2:
                member.shrink([2])
                check_without_switch(member)
            exchange(folder, "shrunk", rank, size)


def run(function: Any, switch: RunningSwitch) -> list[Any]:
    found = values(run_ranks(function, RANKS, switch.endpoint, switch.process.pid, timeout_s=90))
    assert switch.process.wait(seconds(10)) == -signal.SIGKILL
    return found


def test_groups_of_a_group_whose_switch_is_lost_form_without_it() -> None:
    with running_switch() as switch:
        run(later_groups, switch)


def first_group(rank: int, size: int, folder: str, endpoint: str, switch_pid: int) -> None:
    if rank == 0:
        os.kill(switch_pid, signal.SIGKILL)
    exchange(folder, "killed", rank, size)
    with outside(in_network(endpoint)) as group:
        handles = exchange(folder, "handles", rank, size, group.handle)
        with pytest.raises(SwitchError):
            group.reconfigure(1, handles)


def test_a_first_group_over_handles_that_its_switch_does_not_take_is_an_error_on_every_member() -> None:
    with running_switch() as switch:
        run(first_group, switch)


def torch_job_whose_switch_dies(rank: int, size: int, folder: str, endpoint: str, switch_pid: int) -> None:
    """torch's default group, which goes on by host algorithms."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    os.environ |= {"NETFOLD_SWITCH": endpoint, "NETFOLD_ALGORITHM": "in_network", "NETFOLD_TRANSPORT": "tcp"}
    dist.init_process_group("netfold", store=FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    dist.all_reduce(torch.ones(1000))
    exchange(folder, "summed", rank, size)
    if rank == 0:
        os.kill(switch_pid, signal.SIGKILL)
    dist.all_reduce(torch.ones(1000))


def with_torch(rank: int, size: int, folder: str, endpoint: str, switch_pid: int) -> int:
    import torch
    import torch.distributed as dist

    torch_job_whose_switch_dies(rank, size, folder, endpoint, switch_pid)
    group = dist.new_group([2, 0])
    tensor = torch.tensor([float(rank + 1)])
    if rank != 1:
        dist.all_reduce(tensor, group=group)
    exchange(folder, "done", rank, size)
    dist.destroy_process_group()
    return int(tensor.item())


def over_the_store(rank: int, size: int, folder: str, endpoint: str, switch_pid: int) -> int:
    import torch
    import torch.distributed as dist

    torch_job_whose_switch_dies(rank, size, folder, endpoint, switch_pid)
    exchange(folder, "lost", rank, size)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match="rank 1"):
        while True:
            dist.all_reduce(torch.ones(1000))
    group = dist.new_group([0, 2], use_local_synchronization=True)
    tensor = torch.tensor([float(rank + 1)])
    dist.all_reduce(tensor, group=group)
    exchange(folder, "done", rank // 2, 2)
    return int(tensor.item())


@pytest.mark.torch
def test_survivors_of_a_torch_job_whose_switch_is_lost_too_form_a_group_over_the_store() -> None:
    with running_switch() as switch:
        found = run_ranks(over_the_store, RANKS, switch.endpoint, switch.process.pid, timeout_s=90, dies=[1])
        assert values([found[0], found[2]]) == [4, 4]
        assert switch.process.wait(seconds(10)) == -signal.SIGKILL


@pytest.mark.torch
def test_new_group_of_a_torch_job_whose_switch_is_lost_forms_without_it() -> None:
    with running_switch() as switch:
        assert run(with_torch, switch) == [4, 2, 4]
