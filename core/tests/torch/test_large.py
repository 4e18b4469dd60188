"""Tensors beyond 2 GiB: counts and offsets that 32 bits do not hold. Two ranks, about 10 GB of memory in all."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import run_ranks, values

pytestmark = [pytest.mark.torch, pytest.mark.soak]

COUNT = (1 << 31) + 12_345
# Round the places where a 31-bit and a 32-bit byte count or index would wrap.
PLACES = (0, 1, (1 << 30) - 1, 1 << 30, (1 << 31) - 1, 1 << 31, COUNT - 1)


def large(rank: int, size: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("netfold", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    tensor = torch.zeros(COUNT, dtype=torch.uint8)
    for index, place in enumerate(PLACES):
        tensor[place] = 10 * index + rank
    dist.all_reduce(tensor)
    check(tensor, [2 * 10 * index + 1 for index in range(len(PLACES))])
    if rank == 1:
        tensor.zero_()
    dist.broadcast(tensor, 0)
    check(tensor, [2 * 10 * index + 1 for index in range(len(PLACES))])
    dist.destroy_process_group()


def check(tensor: Any, expected: list[int]) -> None:
    assert [int(tensor[place]) for place in PLACES] == expected
    assert int(tensor.count_nonzero()) == len(PLACES), "and nothing elsewhere"


def test_tensors_of_more_than_2_gib_are_reduced() -> None:
    values(run_ranks(large, 2, timeout_s=600))
