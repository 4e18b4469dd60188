"""A small DDP training step as a trial: what a faster collective brings to a user."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from netfold_lab.bench.start_line import StartLine

LAYERS = 6
# With few rows a step, communication takes longer than arithmetic, as where many ranks train such a model.
ROWS = 4


class DdpTrial:
    """`steps` optimizer steps a burst; the sum of all parameters must agree between ranks after each burst."""

    def __init__(self, group: Any, line: StartLine, rank: int, steps: int, width: int) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)]
        self._model = DistributedDataParallel(torch.nn.Sequential(*layers), process_group=group)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-4)
        self._rows = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(rank))
        self._line = line
        self._steps = steps
        # DDP regroups its buckets after the first step.
        for _ in range(2):
            self._step()

    def burst(self, round_index: int) -> list[int]:
        self._line.cross()
        durations = []
        for _ in range(self._steps):
            started_ns = time.perf_counter_ns()
            self._step()
            durations.append(time.perf_counter_ns() - started_ns)
        return durations

    def wrong_elements(self, round_index: int) -> int:
        """Count the layers that differ from rank 0's. The ranks add the same gradients, so no bit may differ."""
        sums = torch.stack([p.detach().double().sum() for p in self._model.parameters()])
        first = sums.clone()
        dist.broadcast(first, 0)
        return int((sums != first).sum())

    def _step(self) -> None:
        self._optimizer.zero_grad()
        self._model(self._rows).square().mean().backward()
        self._optimizer.step()
