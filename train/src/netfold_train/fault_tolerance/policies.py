"""Reactions to a loss or gradient that is not finite, and to a device that fails."""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from netfold.units import first_few
from netfold_train.data.examples import BadExampleError, Batch
from netfold_train.fault_tolerance.stop import PolicyStopError
from netfold_train.parallel.mesh import Mesh, gather
from netfold_train.parallel.shards import local
from netfold_train.recipe import FaultTolerance


class NonFiniteError(PolicyStopError):
    """A loss or gradient is not finite, and the policy is to stop, or its limit is reached."""


class DeviceError(RuntimeError):
    """The device is out of memory, or failed. The message has the rank, the step, the sizes and what to try."""


class NonFinite:
    """Count the steps with bad numbers, and stop at the recipe's limit."""

    def __init__(self, recipe: FaultTolerance) -> None:
        self._recipe = recipe
        self._in_row = 0
        self._furthest = 0

    def state_dict(self) -> dict[str, int]:
        """The counts, the same on all ranks."""
        return {"in_row": self._in_row, "furthest": self._furthest}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._in_row, self._furthest = state["in_row"], state["furthest"]

    def fine(self, step: int) -> None:
        """Count a good step. It ends a row only past the furthest bad step; otherwise a job could rewind forever."""
        if step > self._furthest:
            self._in_row = 0

    def bad(self, step: int, what: str) -> str:
        """Count a bad step; called on all ranks alike. Returns "skip" or "rewind", or raises NonFiniteError."""
        self._in_row += 1
        self._furthest = max(self._furthest, step)
        policy = self._recipe.non_finite
        tries = "try a lower optimizer.lr, more schedule.warmup, training.clip, or training.precision bf16 or f32"
        if policy == "stop":
            raise NonFiniteError(f'{what}; {tries}; fault_tolerance.non_finite = "skip" leaves such steps out')
        if self._in_row >= self._recipe.non_finite_limit:
            raise NonFiniteError(f"{what}; that is {self._in_row} in a row (fault_tolerance.non_finite_limit); {tries}")
        return policy


def bad_gradients(parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """The names of the parameters whose gradient is not finite. Cost: one pass over the gradients."""
    gradients = {name: _values(each.grad) for name, each in parameters.items() if each.grad is not None}
    if not gradients:
        return []
    all_of_them = list(gradients.values())
    found, one = all_of_them[0].new_zeros((), dtype=torch.float32), all_of_them[0].new_ones((), dtype=torch.float32)
    # GradScaler's check, which with a scale of 1 changes nothing: torch has no faster one.
    torch._amp_foreach_non_finite_check_and_unscale_(all_of_them, found, one)
    return [name for name, each in gradients.items() if not each.isfinite().all()] if found else []


def what_is_bad(
    step: int, loss: Tensor | None, gradients: list[str], group: dist.ProcessGroup | None = None, *, alone: bool = False
) -> str:
    """One sentence, the same on all ranks. Collective over the group, by default the world.

    alone: a sentence about this rank, without communication.
    """
    bad_loss = loss is not None and not math.isfinite(loss)
    causes = [f"loss {float(loss)}"] if loss is not None and bad_loss else []
    causes += [f"gradients of {first_few(gradients, 3)}"] if gradients else []
    own = bad_loss, f"{this_rank()}: {' and '.join(causes)}" if causes else ""
    found = [own] if alone else gather(own, group)
    # Gradients are averages already: if a loss is bad, only its rank's gradients identify the cause.
    parts = [text for bad, text in found if bad] or [text for _, text in found if text]
    return f"step {step}: not finite: {'; '.join(parts) or 'the loss or gradients of another rank'}"


def explain_device_error(error: Exception, step: int, batch: Batch | None) -> Exception | None:
    """The same failure with its place and what to try; None if there is nothing to add."""
    if "PeerLost" in f"{type(error).__name__} {error}":
        return None  # The error has the failed rank's own text.
    rank = f"{this_rank()}: step {step}"
    shapes = [] if batch is None else [str(list(each.shape)) for each in batch.tensors]
    sizes = f" with a batch of {', '.join(shapes)}" if shapes else ""
    first_line = (str(error) or type(error).__name__).splitlines()[0]
    if isinstance(error, BadExampleError):
        return BadExampleError(
            f'{rank}: {error}; repair the data, or fault_tolerance.missing_data = "skip" takes other training examples'
        )
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
        return DeviceError(
            f"{rank}{sizes}: out of memory: {first_line}; try a larger training.accumulate, a smaller "
            "training.batch, more ranks with parallel.zero = 3, or parallel.pipeline"
        )
    if isinstance(error, torch.AcceleratorError):
        return DeviceError(
            f"{rank}{sizes}: the device failed: {first_line}; take the host out of the job, or restart it"
        )
    return None


def abort_groups(mesh: Mesh, error: Exception) -> None:
    """Abort this rank's groups with the reason, so that waiting ranks fail at once."""
    axes = [mesh.pipeline, mesh.data, mesh.tensor, mesh.site, *([] if mesh.between is None else [mesh.between])]
    groups: set[Any] = {dist.group.WORLD, *(axis.group for axis in axes)}
    for group in groups:
        # Other backends detect the end of the process, and a job of theirs loads nothing native.
        if "netfold" in dist.get_backend_config(group):
            from netfold.torch.operations import operations_of

            operations = operations_of(group)
            assert operations is not None
            operations.netfold.abort(str(error))


def this_rank() -> str:
    return f"rank {dist.get_rank()} ({socket.gethostname()})"


def _values(gradient: Tensor) -> Tensor:
    values = local(gradient)
    values = values._values() if values.is_sparse else values
    return torch.view_as_real(values) if values.is_complex() else values
