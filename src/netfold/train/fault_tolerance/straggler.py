"""A rank that computes much slower than the others: named, with its host, before people look for it for days.

Measured is a rank's own time in a step: waiting for its batch, and computing until its first layer's gradient is there.
Compared are ranks that have equal work to do: those of one stage and one part of the layers, along the data axis.
Under data parallelism nobody waits for another until then; where ranks do (pipeline, tensor, zero 3, batch norm over
several), those that wait for each other look alike, and only groups of them are told apart.
"""

from __future__ import annotations

import itertools
import socket
import statistics
import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from netfold.train.fault_tolerance.stop import PolicyStopError
from netfold.train.mesh import Mesh
from netfold.train.recipe import FaultTolerance

# A window is so many steps: one all_gather of two numbers.
WINDOW_STEPS = 20
# A rank is named when it was slow in so many windows running: a pause of a second is nobody's fault.
WINDOWS = 3


class StragglerError(PolicyStopError):
    """A rank is too slow, and the policy is to stop."""


class Straggler:
    """Compares the ranks' own time, every WINDOW_STEPS steps."""

    def __init__(self, modules: Iterable[nn.Module], recipe: FaultTolerance, mesh: Mesh) -> None:
        """modules: a replica's. mesh: with two data-parallel ranks or more; one alone has no one to be held against."""
        self._ratio = recipe.straggler_ratio
        self._alike = mesh.alike()
        self._ready_s = 0.0
        self._own_s, self._data_s, self._steps = 0.0, 0.0, 0
        self._slow: dict[int, int] = {}
        self._named: set[int] = set()
        # A stage's first layer is the last to get its gradients. A hook a parameter would have the backward pass ask
        # for the interpreter's lock that often, which the thread that makes batches holds for milliseconds.
        for module in modules:
            for parameter in itertools.islice(filter(lambda each: each.requires_grad, module.parameters()), 1):
                parameter.register_post_accumulate_grad_hook(self._gradient_ready)  # type: ignore[no-untyped-call]

    def stepped(self, began_s: float, data_s: float, gradients_s: float, *, may_compare: bool = True) -> str | None:
        """After a step; all by time.perf_counter: when it began, how long its batch took, when gradients() was done.

        A sentence when a rank has been slow for WINDOWS windows running, once a rank and alike on all of them.
        Collective over the world in every WINDOW_STEPS-th call, or the next one that `may_compare`.
        """
        # Where no hook saw a gradient (zero 3 sets them itself) there is only the whole.
        self._own_s += (self._ready_s if self._ready_s > began_s else gradients_s) - began_s
        self._data_s += data_s
        self._steps += 1
        if self._steps < WINDOW_STEPS or not may_compare:
            return None
        own = torch.tensor([self._own_s, self._data_s], dtype=torch.float64) / self._steps
        self._own_s, self._data_s, self._steps = 0.0, 0.0, 0
        return self._compare(own)

    def _compare(self, own: Tensor) -> str | None:
        rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, own)
        times = [row.tolist() for row in rows]
        # The lower one of two: among two ranks the slow one would be its own measure.
        medians_s = [statistics.median_low(times[rank][0] for rank in ranks) for ranks in self._alike]
        median_s = {rank: median for ranks, median in zip(self._alike, medians_s, strict=True) for rank in ranks}
        slow = {rank for rank, (own_s, _) in enumerate(times) if own_s >= self._ratio * median_s[rank]}
        self._slow = {rank: self._slow.get(rank, 0) + 1 for rank in slow}
        found = sorted(rank for rank, windows in self._slow.items() if windows >= WINDOWS and rank not in self._named)
        if not found:
            return None
        self._named.update(found)
        hosts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(hosts, socket.gethostname())
        parts = [
            f"rank {rank} ({hosts[rank]}) takes {times[rank][0]:.3f} s a step for itself, {times[rank][1]:.3f} s of it "
            f"waiting for its batch, where the median of {len(self._alike[0])} ranks with the same work takes "
            f"{median_s[rank]:.3f} s"
            for rank in found
        ]
        return f"{'; '.join(parts)}; look for other work on that host, a hot or throttled processor, a slow disk"

    def _gradient_ready(self, _: Tensor) -> None:
        self._ready_s = time.perf_counter()
