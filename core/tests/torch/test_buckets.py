"""DDP's buckets move to shared memory in place; the script sees only a log line and shorter steps."""

from __future__ import annotations

import itertools
import os
import subprocess
from typing import Any

import pytest
from fabrics import need_libfabric
from ranks import run_ranks, values

pytestmark = pytest.mark.torch

STEPS = 6


def train(rank: int, size: int, folder: str) -> dict[str, Any]:
    """For each way to run DDP: the gradients of the last step, buckets moved, and whether addresses then stayed."""

    import torch
    import torch.distributed as dist

    from netfold.torch.operations import operations_of

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
        moved = list(operations_of(dist.group.WORLD)._buckets._moved.values())
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


def test_repeated_buckets_move_and_gradients_stay_the_same() -> None:
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
    from netfold.torch.operations import operations_of

    torch.set_num_threads(1)
    dist.init_process_group("netfold", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    network = torch.nn.Sequential(torch.nn.Linear(700, 700), torch.nn.Linear(700, 700))
    ddp = torch.nn.parallel.DistributedDataParallel(network, bucket_cap_mb=1)
    for step in range(STEPS):
        ddp.zero_grad()
        ddp(torch.full((3, 700), float(rank + step + 1))).sum().backward()
    backend: Any = operations_of(dist.group.WORLD)
    records = backend.netfold.events()
    large = records[(records["bytes"] > 1 << 20) & (records["operation"] == KINDS["all_reduce"])]
    held = len(backend._buckets._leases)
    dist.destroy_process_group()
    return held, large["registration_hits"].tolist(), large["registration_misses"].tolist()


def test_over_a_fabric_repeated_buckets_stay_registered() -> None:
    need_libfabric()
    env = {"NETFOLD_TRANSPORT": "fabric:tcp", "NETFOLD_ALGORITHM": "ring", "NETFOLD_INTERFACE": "127.0.0.1"}
    for held, hits, misses in values(run_ranks(train_over_fabric, 2, env=env)):
        assert held == 2
        assert [a + b for a, b in zip(hits, misses, strict=True)] == [1] * len(hits)
        # Both buckets, from the fourth step on.
        assert hits[-4:] == [1] * 4, hits
        assert misses[0] == 1


def short_of_room(rank: int, size: int, folder: str, how: str) -> tuple[list[str], int]:
    """Return what is logged where /dev/shm is of no use, and how many buckets moved."""
    import ctypes
    import logging

    import torch
    import torch.distributed as dist

    from netfold.torch import buckets
    from netfold.torch.operations import operations_of

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("netfold").addHandler(handler)
    if how == "short":
        buckets.shm_shortage = lambda wanted_bytes: "/dev/shm has no room"
    else:
        # This rank's alone, and gone with it: in a mount namespace of its own.
        assert ctypes.CDLL(None, use_errno=True).unshare(0x00020000) == 0  # CLONE_NEWNS
        what, where = {
            "read-only": ("-t tmpfs -o ro tmpfs", "/dev/shm"),
            "refused": ("-t tmpfs tmpfs", "/dev/shm"),
            "absent": ("--bind /proc/1", "/dev"),  # a folder without shm
        }[how]
        # Of all mounts that one alone: in a chroot, / is none.
        below = f'mount --make-rprivate "$(findmnt --noheadings --output TARGET --target {where} | tail -n 1)"'
        subprocess.run(f"{below} && mount {what} {where}", shell=True, check=True)
        if how == "refused":  # root may write everywhere: as open() answers another user
            buckets.shm_shortage = lambda wanted_bytes: None
            subprocess.run("mount -o remount,ro /dev/shm", shell=True, check=True)
    dist.init_process_group("netfold", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    network = torch.nn.Linear(700, 700)
    ddp = torch.nn.parallel.DistributedDataParallel(network)
    for _ in range(STEPS):
        ddp(torch.ones(2, 700)).sum().backward()
    moved = len(operations_of(dist.group.WORLD)._buckets._moved)
    dist.destroy_process_group()
    return said, moved


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("short", "/dev/shm has no room"),
        ("read-only", "/dev/shm is read-only"),
        ("refused", "Read-only file system"),
        ("absent", "there is no /dev/shm"),
    ],
)
def test_buckets_stay_in_place_with_a_warning_if_dev_shm_is_unusable(how: str, sentence: str) -> None:
    private = ["unshare", "--mount", "--propagation", "unchanged", "true"]
    if how != "short" and subprocess.run(private, capture_output=True).returncode != 0:
        pytest.skip("needs root, and leave to make a mount namespace, for another /dev/shm")
    for said, moved in values(run_ranks(short_of_room, 2, how, timeout_s=60)):
        assert moved == 0
        (line,) = [line for line in said if "DDP's buckets" in line]  # once
        assert line.startswith("DDP's buckets stay in private memory: ")
        assert sentence in line


def test_the_shortage_is_computed_from_the_file_systems_figures() -> None:
    from netfold.torch.buckets import shm_shortage

    assert shm_shortage(0) is None
    assert "/dev/shm has no room for" in str(shm_shortage(1 << 60))
