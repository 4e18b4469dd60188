"""Name a rank that computes much slower than ranks with equal work, and its host.

The measure is a rank's own time in a step: it waits for its batch, then computes until its first layer's gradient is
complete. Ranks along the data axis have equal work, and are compared. Under data parallelism a rank waits for no other
rank until then. Ranks that do wait for each other (pipeline, tensor, zero 3, batch norm over several) have equal times,
so only groups of them can be told apart.
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

from netfold_train.fault_tolerance.stop import PolicyStopError
from netfold_train.parallel.mesh import Mesh, gather
from netfold_train.recipe import FaultTolerance

# Steps of a window, which ends with one all_gather of two numbers.
WINDOW_STEPS = 20
# A rank is named after this many slow windows in a row, so that a short pause is ignored.
WINDOWS = 3


class StragglerError(PolicyStopError):
    """A rank is too slow, and the policy is to stop."""


class Straggler:
    """Compare the ranks' own times every WINDOW_STEPS steps."""

    def __init__(self, modules: Iterable[nn.Module], recipe: FaultTolerance, mesh: Mesh) -> None:
        """modules: a replica's. mesh: with at least two data-parallel ranks."""
        self._ratio = recipe.straggler_ratio
        self._alike = mesh.runs(mesh.data.size)
        self._ready_s = 0.0
        self._own_s, self._data_s, self._steps = 0.0, 0.0, 0
        self._slow: dict[int, int] = {}
        self._named: set[int] = set()
        self._hooks: list[Any] = []
        # A stage's first layer gets its gradients last. One hook is enough: with a hook for each parameter the backward
        # pass would take the GIL that often, which the thread that makes batches holds for milliseconds.
        for module in modules:
            for parameter in itertools.islice(filter(lambda each: each.requires_grad, module.parameters()), 1):
                hook = parameter.register_post_accumulate_grad_hook(self._gradient_ready)  # type: ignore[no-untyped-call]
                self._hooks.append(hook)

    def close(self) -> None:
        """Observe the modules no longer."""
        for hook in self._hooks:
            hook.remove()

    def stepped(self, began_s: float, data_s: float, gradients_s: float) -> None:
        """Record a step: its begin, the wait for its batch, and the end of gradients(), by time.perf_counter."""
        # zero 3 sets gradients itself, and calls no hook: then the whole time counts.
        self._own_s += (self._ready_s if self._ready_s > began_s else gradients_s) - began_s
        self._data_s += data_s
        self._steps += 1

    @property
    def is_due(self) -> bool:
        """Whether a window is complete: on all ranks alike."""
        return self._steps >= WINDOW_STEPS

    def compare(self) -> str | None:
        """End the window. Collective over the world.

        Returns a sentence, the same on all ranks, when a rank has been slow for WINDOWS windows in a row; once per
        rank.
        """
        own = torch.tensor([self._own_s, self._data_s], dtype=torch.float64) / self._steps
        self._own_s, self._data_s, self._steps = 0.0, 0.0, 0
        rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, own)
        times = [row.tolist() for row in rows]
        # The lower median: of two ranks the slow one must not be the measure.
        medians_s = [statistics.median_low(times[rank][0] for rank in ranks) for ranks in self._alike]
        median_s = {rank: median for ranks, median in zip(self._alike, medians_s, strict=True) for rank in ranks}
        slow = {rank for rank, (own_s, _) in enumerate(times) if own_s >= self._ratio * median_s[rank]}
        self._slow = {rank: self._slow.get(rank, 0) + 1 for rank in slow}
        found = sorted(rank for rank, windows in self._slow.items() if windows >= WINDOWS and rank not in self._named)
        if not found:
            return None
        self._named.update(found)
        hosts = gather(socket.gethostname())
        parts = [
            f"rank {rank} ({hosts[rank]}) takes {times[rank][0]:.3f} s of its own per step, of which "
            f"{times[rank][1]:.3f} s waiting for its batch; the median of {len(self._alike[0])} ranks with equal work "
            f"takes {median_s[rank]:.3f} s"
            for rank in found
        ]
        return f"{'; '.join(parts)}; look for other work on that host, a hot or throttled processor, a slow disk"

    def _gradient_ready(self, _: Tensor) -> None:
        self._ready_s = time.perf_counter()
