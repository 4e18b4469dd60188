"""A framework that logs at info, such as Ray, sees one line of a job with any groups."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, running_switch, values
from torch.distributed.device_mesh import init_device_mesh

pytestmark = pytest.mark.torch

SIZE = 2


def train(rank: int, size: int, folder: str) -> list[tuple[str, str]]:
    """Every line that netfold writes to a root logger at info, over a step of DDP, another group and a mesh."""
    lines: list[tuple[str, str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.name, record.getMessage()))  # type: ignore[method-assign]
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    dist.init_process_group("netfold", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    for _ in range(3):
        model(torch.ones(2, 64)).sum().backward()
    dist.all_reduce(torch.ones(4), group=dist.new_group())
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("replicate", "shard"))
    dist.all_reduce(torch.ones(4), group=mesh["shard"].get_group())
    dist.destroy_process_group()
    return [line for line in lines if line[0].partition(".")[0] == "netfold"]


def only_line(env: dict[str, str]) -> str:
    logged = values(run_ranks(train, SIZE, env=env))
    assert logged[1] == []
    ((name, text),) = logged[0]
    assert name == "netfold"
    return text


def test_a_root_logger_at_info_sees_one_line_of_a_job_of_two_ranks() -> None:
    for transport in ("auto", "tcp"):
        assert only_line({"NETFOLD_TRANSPORT": transport}).startswith("rank 0 of 2 ")


def test_a_root_logger_at_info_sees_one_line_of_a_job_with_a_switch() -> None:
    with running_switch() as switch:
        env = {"NETFOLD_TRANSPORT": "tcp", "NETFOLD_SWITCH": switch.endpoint}
        text = only_line({**env, "NETFOLD_ALGORITHM": "all_reduce=in_network"})
    assert "in_network (NETFOLD_ALGORITHM=all_reduce=in_network)" in text
    with running_switch() as switch:
        text = only_line({"NETFOLD_TRANSPORT": "auto", "NETFOLD_SWITCH": switch.endpoint})
    assert switch.endpoint in text
