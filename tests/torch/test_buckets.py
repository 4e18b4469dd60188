"""DDP's buckets move to shared memory in place: unseen by the script, but for the log and the time a step takes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from ranks import run_ranks, values

pytestmark = pytest.mark.torch

STEPS = 6


def train(rank: int, size: int, folder: str) -> dict[str, Any]:
    """For each way to run DDP: the gradients of the last step, buckets moved, and whether addresses then stayed."""
    import os

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    found = {}
    for share, as_view in itertools.product(("on", "off"), (False, True)):
        os.environ["NETFOLD_SHARE_BUCKETS"] = share
        dist.init_process_group("netfold", init_method=f"file://{folder}/{share}-{as_view}", rank=rank, world_size=size)
        torch.manual_seed(7)
        # Two buckets; the second, and a view of it, is what a user may hold.
        network = torch.nn.Sequential(torch.nn.Linear(700, 700), torch.nn.Linear(700, 700))
        ddp = torch.nn.parallel.DistributedDataParallel(network, bucket_cap_mb=1, gradient_as_bucket_view=as_view)
        addresses = []
        for step in range(STEPS):
            ddp.zero_grad(set_to_none=not as_view)
            ddp(torch.full((3, 700), float(rank + step + 1))).sum().backward()
            addresses.append([parameter.grad.data_ptr() for parameter in network.parameters()])
        moved = list(dist.group.WORLD._buckets._moved.values())
        found[f"{share} {as_view}"] = {
            "gradients": [parameter.grad.clone() for parameter in network.parameters()],
            "moved": [storage.is_shared() for storage in moved],
            "steady": not as_view or addresses[-1] == addresses[-2],
        }
        del moved
        dist.destroy_process_group()
    digests = {}
    for name, run in found.items():
        digests[name] = ([gradient.numpy().tobytes().hex()[:4000] for gradient in run["gradients"]], run["moved"])
        assert run["steady"], name
    return digests


def test_buckets_move_when_they_came_again_and_gradients_stay_the_same() -> None:
    for found in values(run_ranks(train, 2, timeout_s=100)):
        gradients = [run[0] for run in found.values()]
        assert all(each == gradients[0] for each in gradients[1:])
        for name, (_, moved) in found.items():
            assert moved == ([True, True] if name.startswith("on") else []), name


def train_over_fabric(rank: int, size: int, folder: str) -> tuple[int, list[int], list[int]]:
    """Buckets that are kept registered, and by operation: hits and misses of the registration cache."""
    import torch
    import torch.distributed as dist

    from netfold.communicator.group import KINDS

    torch.set_num_threads(1)
    dist.init_process_group("netfold", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    network = torch.nn.Sequential(torch.nn.Linear(700, 700), torch.nn.Linear(700, 700))
    ddp = torch.nn.parallel.DistributedDataParallel(network, bucket_cap_mb=1)
    for step in range(STEPS):
        ddp.zero_grad()
        ddp(torch.full((3, 700), float(rank + step + 1))).sum().backward()
    backend: Any = dist.group.WORLD
    records = backend.netfold.events()
    large = records[(records["bytes"] > 1 << 20) & (records["operation"] == KINDS["all_reduce"])]
    held = len(backend._buckets._held)
    dist.destroy_process_group()
    return held, large["registration_hits"].tolist(), large["registration_misses"].tolist()


def test_over_a_fabric_buckets_stay_registered_once_they_came_again() -> None:
    env = {"NETFOLD_TRANSPORT": "fabric:tcp", "NETFOLD_ALGORITHM": "ring", "NETFOLD_INTERFACE": "127.0.0.1"}
    for held, hits, misses in values(run_ranks(train_over_fabric, 2, env=env)):
        assert held == 2
        assert [a + b for a, b in zip(hits, misses, strict=True)] == [1] * len(hits)
        # Both buckets, from the fourth step on.
        assert hits[-4:] == [1] * 4, hits
        assert misses[0] == 1


def short_of_room(rank: int, size: int, folder: str) -> tuple[list[str], int]:
    """What is logged where /dev/shm is short, and how many buckets moved."""
    import logging

    import torch
    import torch.distributed as dist

    from netfold.torch import buckets

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("netfold").addHandler(handler)
    buckets.has_room = lambda wanted_bytes: False
    dist.init_process_group("netfold", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    network = torch.nn.Linear(700, 700)
    ddp = torch.nn.parallel.DistributedDataParallel(network)
    for _ in range(STEPS):
        ddp(torch.ones(2, 700)).sum().backward()
    moved = len(dist.group.WORLD._buckets._moved)
    dist.destroy_process_group()
    return said, moved


def test_buckets_stay_where_they_are_and_say_so_where_there_is_no_room() -> None:
    for said, moved in values(run_ranks(short_of_room, 2, timeout_s=60)):
        assert moved == 0
        (line,) = [line for line in said if "/dev/shm" in line]  # once
        assert line.startswith("DDP's buckets stay where they are")


def test_room_is_what_the_file_system_says() -> None:
    from netfold.torch.buckets import has_room

    assert has_room(0) and not has_room(1 << 60)
