"""Data parallel: torch's DDP, whose gradients travel in buckets while the backward pass goes on, and how large ones.

The talk's fusion buffer of 64 MB is where it starts. Smaller buckets leave earlier, so more of them travels beside
computing; each costs a collective. Which is better depends on model, machine and network: so the first steps of
training try a few sizes. They are ordinary steps: sums of the same gradients, whatever bucket they travel in.
"""

from __future__ import annotations

import inspect
import statistics
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from netfold.train.mesh import Mesh

# torch 2.12 and older have one switch for buffers at the start and before each forward pass.
BUFFERS_APART = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
START_MB = 64.0
CANDIDATES_MB = (START_MB, 16.0, 4.0, 1.0)
# Each size has its turn twice, so that a machine that grows slower meanwhile does not choose for us.
ROUNDS = 2
# DDP's first step runs with one bucket of all, and the second one begins by laying them out.
SETTLING_STEPS = 2
TIMED_STEPS = 3


def wrap_ddp(
    module: nn.Module, mesh: Mesh, bucket_mb: float = START_MB, *, synchronise: bool = True
) -> DistributedDataParallel:
    """`module` under DDP over the data axis; collective over it. Without `synchronise`, weights are alike already.

    Gradients are views of the buckets: no bytes beside them. Buffers are not sent before each forward pass: training
    does not read batch norm's statistics (`Whole.outputs` makes them rank 0's where they are read).
    """
    not_before_forward: dict[str, Any] = {"forward_sync_buffers" if BUFFERS_APART else "broadcast_buffers": False}
    ddp = DistributedDataParallel(
        module,
        process_group=mesh.data.group,
        bucket_cap_mb=bucket_mb,
        gradient_as_bucket_view=True,
        init_sync=synchronise,
        **not_before_forward,
    )
    if synchronise and not BUFFERS_APART:
        for buffer in module.buffers():
            dist.broadcast(buffer, group=mesh.data.group, group_src=0)
    return ddp


class Tuning:
    """Tries sizes in turn, some steps each, and keeps the one that the ranks together were quickest with."""

    def __init__(self, ddp: DistributedDataParallel, mesh: Mesh) -> None:
        """ddp: with buckets of START_MB."""
        self._mesh = mesh
        total_mb = sum(tensor.numel() * tensor.element_size() for tensor in ddp.parameters()) / 2**20
        # What is larger than all gradients is one bucket of all, and so is the first candidate.
        self._candidates = tuple(size for size in CANDIDATES_MB if size == START_MB or size < total_mb)
        self._turns = self._candidates * ROUNDS if len(self._candidates) > 1 else ()
        self._seconds: dict[float, list[float]] = {size: [] for size in self._candidates}
        self._step = 0
        self._size_mb = self._best_mb = START_MB
        self.ddp = ddp
        """To compute the next step with."""
        self.done = not self._turns

    def begin(self) -> None:
        """Before a step, when no gradients are left of the last one: lay out the buckets that it shall use."""
        turn, step = divmod(self._step, SETTLING_STEPS + TIMED_STEPS)
        size = self._size_mb
        if turn == len(self._turns):
            size, self.done = self._best_mb, True
        elif step == 0:
            size = self._turns[turn]
        if size != self._size_mb:
            self._size_mb = size
            # The old one must not see another gradient, whoever has it still.
            self.ddp._remove_autograd_hooks()  # type: ignore[no-untyped-call]
            self.ddp = wrap_ddp(self.ddp.module, self._mesh, size, synchronise=False)

    def end(self, seconds: float) -> str | None:
        """After a step whose forward and backward passes took `seconds`. After the last trial: which size it is, and
        why. Collective over the data axis then: one all_reduce of a few numbers."""
        if self._step % (SETTLING_STEPS + TIMED_STEPS) >= SETTLING_STEPS:
            self._seconds[self._size_mb].append(seconds)
        self._step += 1
        if self._step < len(self._turns) * (SETTLING_STEPS + TIMED_STEPS):
            return None
        # Quartiles, the mean over the ranks: the same numbers everywhere, so the same choice.
        quartiles = torch.tensor(
            [statistics.quantiles(times, n=4) for times in self._seconds.values()], dtype=torch.float64
        )
        dist.all_reduce(quartiles, group=self._mesh.data.group)
        quartiles *= 1000.0 / self._mesh.data.size
        chosen = int(quartiles[:, 1].argmin())
        self._best_mb = self._candidates[chosen]
        said = ", ".join(
            f"{size:g} MB {middle:.1f} ms ({low:.1f} to {high:.1f})"
            for size, (low, middle, high) in zip(self._candidates, quartiles.tolist(), strict=True)
        )
        gain = 1.0 - float(quartiles[chosen, 1] / quartiles[0, 1])
        why = f"{gain:.1%} less time than with {START_MB:g} MB" if chosen else "no other was quicker"
        return (
            f"gradients travel in buckets of {self._best_mb:g} MB: {why}; a step's forward and backward took {said}, "
            "medians and middle halves"
        )
