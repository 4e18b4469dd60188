"""Situations that users of torch.distributed reported as faults of other backends, with their values compared."""

from __future__ import annotations

import gc
import os
import time
from typing import Any

import pytest
from worlds import Case, check

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("torch_reports")]  # the world is made once

MODES = ("auto",)
CASES: dict[str, Case] = {}


def case(function: Any) -> Any:
    CASES[function.__name__] = lambda dist, rank, size, folder: function(dist, rank, size)
    return function


@case
def ddp_averages_complex_gradients(dist: Any, rank: int, size: int) -> None:
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.complex(torch.ones(3, 5), torch.zeros(3, 5)))

        def forward(self, factor: Any) -> Any:
            return (self.weight * factor).abs().square().sum()

    model = torch.nn.parallel.DistributedDataParallel(Model())
    model(torch.full((3, 5), rank + 1.0)).backward()
    mean = sum(2.0 * (other + 1) ** 2 for other in range(size)) / size
    torch.testing.assert_close(model.module.weight.grad, torch.full((3, 5), mean, dtype=torch.complex64))


@case
def messages_of_one_tag_arrive_in_the_order_of_the_sends(dist: Any, rank: int, size: int) -> None:
    """Small and large ones take different ways, and receives may be posted early or late."""
    import torch

    other, counts = rank ^ 1, (1, 300_000, 2, 70_000, 0, 3) * 3
    for posted in (True, False):
        into = [torch.empty(count) for count in counts]
        receives = [dist.irecv(each, other) for each in into] if posted else []
        sends = [dist.isend(torch.full((count,), float(at)), other) for at, count in enumerate(counts)]
        receives = receives or [dist.irecv(each, other) for each in into]
        for work in (*receives, *sends):
            work.wait()
        for at, each in enumerate(into):
            assert each.eq(at).all(), (posted, at)


@case
def groups_of_local_synchronization_are_made_different_numbers_of_times(dist: Any, rank: int, size: int) -> None:
    import torch

    for _ in range(3 if rank < 2 else 1):
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        group = dist.new_group(pair, use_local_synchronization=True)
        tensor = torch.tensor([rank + 1.0])
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == sum(pair) + 2
    # Over all ranks gloo waits for ever: torch's name of a group counts the calls of the rank.
    tensor = torch.tensor([1.0])
    dist.all_reduce(tensor, group=dist.new_group(list(range(size)), use_local_synchronization=True))
    assert tensor.item() == size


@case
def a_group_larger_than_the_world_is_refused_and_the_world_goes_on(dist: Any, rank: int, size: int) -> None:
    import torch

    with pytest.raises((ValueError, RuntimeError)):
        dist.new_group(list(range(size + 1)))
    tensor = torch.tensor([rank])
    dist.all_reduce(tensor)
    assert tensor.item() == sum(range(size))


@case
def many_operations_leave_few_descriptors_and_little_memory_behind(dist: Any, rank: int, size: int) -> None:
    import torch

    def used_bytes() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def use() -> None:
        for turn in range(150):
            tensor = torch.full((40_000,), float(rank))
            work = dist.all_reduce(tensor, async_op=turn % 2 == 0)
            if work is not None:
                assert work.get_future().wait()[0][0].item() == sum(range(size))
            dist.all_gather([torch.empty(100) for _ in range(size)], torch.zeros(200)[::2])
        gc.collect()

    use()
    before, descriptors = used_bytes(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        use()
    # A peer's memory may be mapped late, once.
    assert len(os.listdir("/proc/self/fd")) - descriptors < 45, "900 operations: one kept in twenty would be more"
    assert used_bytes() - before < 24 << 20, "450 operations of 160 kB: one lost tensor in three would be more"


@case
def the_last_data_of_a_rank_that_leaves_arrive(dist: Any, rank: int, size: int) -> None:
    """It destroys the group directly after an asynchronous call, which the other ranks make later. Former fault: they
    got an error where the data were more than a connection buffers."""
    import torch

    from netfold import Options

    def calls(count: int, group: Any) -> list[Any]:
        mine = torch.arange(count) * 8 + rank
        blank, parts = torch.zeros_like(mine), [torch.zeros_like(mine) for _ in range(size)]
        given = [mine] * size
        summed = sum(torch.arange(count) * 8 + other for other in range(size))
        options = {"group": group, "async_op": True}
        got = mine if rank == 1 else blank
        calls = [
            lambda: (dist.all_reduce(got.copy_(mine), **options), got, summed),
            lambda: (dist.broadcast(got, 1, **options), got, torch.arange(count) * 8 + 1),
            lambda: (dist.all_gather(parts, mine, **options), parts[1], torch.arange(count) * 8 + 1),
            lambda: (dist.all_to_all(parts, given, **options), parts[1], torch.arange(count) * 8 + 1),
            lambda: (dist.reduce_scatter(blank, given, **options), blank, summed),
            lambda: (dist.reduce(mine, 0, **options), *([mine, summed] if rank == 0 else [count, count])),
        ]
        if rank == 1:
            return [*calls, lambda: (dist.isend(mine, 0, group=group), count, count)]
        return [*calls, lambda: (dist.irecv(blank, 1, group=group) if rank == 0 else None, blank, blank)]

    for transport in ("auto", "tcp"):
        for count in (10, 300_000):
            for at in range(7):
                group = dist.new_group(pg_options=Options(transport=transport))
                if rank != 1:
                    time.sleep(0.05)
                work, got, right = calls(count, group)[at]()
                if rank != 1 and work is not None:
                    work.wait()
                    assert not isinstance(got, torch.Tensor) or torch.equal(got, right), (transport, count, at)
                dist.destroy_process_group(group)


@pytest.mark.parametrize("name", CASES)
def test_each_case_passes_on_every_rank(name: str) -> None:
    check(__name__, MODES, "auto", name)
