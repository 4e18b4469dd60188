"""A training step by netfold.horovod.torch beside a step by DDP over netfold, in turns in the same processes:

.venv/bin/python lab/bench/horovod_step.py
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import driver
import torch
from driver import Place, Rank, cell, take_turns
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import netfold.horovod.torch as hvd
from netfold_lab.bench.spread import paired_ratios

SIDES = ("alone", "ddp", "hvd")


def network(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10),
    )  # fmt: skip


def serve(me: Rank, width: int) -> None:
    """A rank. An order: the seconds of a step of a side, the mean of `steps`."""
    inputs = torch.randn(8, 1, 28, 28)
    targets = torch.randint(10, (8,))

    def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def step() -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

        return step

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), 0.01, foreach=True)

    with me.torch_group():
        hvd.init()
        plain, ddp, ours = network(width), DistributedDataParallel(network(width)), network(width)
        hvd.broadcast_parameters(ours.state_dict(), root_rank=0)
        steps_of = {
            "alone": step_of(plain, sgd(plain)),
            "ddp": step_of(ddp, sgd(ddp)),
            "hvd": step_of(ours, hvd.DistributedOptimizer(sgd(ours), ours.named_parameters())),
        }
        me.serve(lambda side, steps: statistics.fmean(me.time(steps_of[side], steps)))
        hvd.shutdown()


def horovod_step(rounds: int = 30, steps: int = 10, width: int = 512, ranks: int = 2) -> str:
    """A step by Horovod's interface beside a step by DDP"""
    with driver.ranks_at(Place(ranks), serve, width) as job:
        # DDP lays buckets out in the first rounds.
        found = take_turns(SIDES, rounds, lambda side: max(job.ask(side, steps)), warmups=2)
    rows = [
        [side, cell(found[side], ".2f", 1e3), cell(paired_ratios(found[side], found["ddp"]), ".3f")] for side in SIDES
    ]
    parameters = sum(each.numel() for each in network(width).parameters())
    return f"""{ranks} ranks, {parameters} parameters; {steps} steps per round. `alone` communicates nothing.

{driver.table("side | ms per step | time over ddp", rows)}"""


if __name__ == "__main__":
    driver.run(horovod_step)
