"""DistributedDataParallel through a killed switch gives the parameters of training without a kill."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from ranks import run_ranks, running_switch, values

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("torch_lost_switch")]

STEPS, KILLED_AT = 16, 8


def trains(rank: int, size: int, folder: str, pid: int) -> tuple[list[float], bytes, list[int]]:
    import torch
    import torch.distributed as dist

    import netfold.torch

    dist.init_process_group("netfold", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    try:
        torch.set_num_threads(1)
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 64))
        parallel = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.05)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05, momentum=0.9)
        generator = torch.Generator().manual_seed(100 + rank)
        losses = []
        for step in range(STEPS):
            inputs = torch.randn(16, 64, generator=generator)
            loss = (parallel(inputs) - inputs.flip(1)).square().mean()
            if step == KILLED_AT and rank == 0 and pid:
                os.kill(pid, signal.SIGKILL)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
        return losses, weights, netfold.torch.events()["algorithm"].tolist()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("wire", ["i32", "auto"])
def test_training_through_a_killed_switch_gives_the_parameters_of_training_without(wire: str) -> None:
    runs: list[list[Any]] = []
    for killed in (False, True):
        with running_switch() as switch:
            env = {"NETFOLD_SWITCH": switch.endpoint, "NETFOLD_WIRE_DTYPE": wire, "NETFOLD_PROBE": "off"}
            runs.append(values(run_ranks(trains, 3, switch.process.pid if killed else 0, env=env, timeout_s=120)))
    for alive, killed_run in zip(*runs, strict=True):
        if wire == "i32":
            assert killed_run[:2] == alive[:2]
        else:
            assert killed_run[0] == pytest.approx(alive[0], rel=1e-5)
        assert len(killed_run[2]) == len(alive[2])
        assert set(killed_run[2][-6:]).isdisjoint(alive[2][-6:])
    assert len({run[1] for run in runs[1]}) == 1
