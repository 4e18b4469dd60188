"""What is done about a loss or gradient that is not a number, and what is said of a device that fails."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from netfold.train.examples import BadExampleError, Batch
from netfold.train.fault_tolerance.stop import PolicyStopError
from netfold.train.mesh import Mesh
from netfold.train.recipe import FaultTolerance
from netfold.train.replica import Replica


class NonFiniteError(PolicyStopError):
    """A loss or gradient is not a number, and the policy is to stop, or was tried too often."""


class DeviceError(RuntimeError):
    """The device is out of memory, or failed. The message has the rank, the step, the sizes and what to try."""


class NonFinite:
    """Counts the steps whose numbers were bad, and says when they are too many."""

    def __init__(self, recipe: FaultTolerance) -> None:
        self._recipe = recipe
        self._in_row = 0
        self._furthest = 0

    def fine(self, step: int) -> None:
        """A good step. In a row are bad ones until training is past the furthest of them: going back does not end it,
        or a job would rewind for ever."""
        if step > self._furthest:
            self._in_row = 0

    def bad(self, step: int, what: str) -> str:
        """Collective knowledge: called on all ranks alike. What to do, "skip" or "rewind"; else NonFiniteError."""
        self._in_row += 1
        self._furthest = max(self._furthest, step)
        policy = self._recipe.non_finite
        tries = "try a lower optimizer.lr, more schedule.warmup, training.clip, or training.precision bf16 or f32"
        if policy == "stop":
            raise NonFiniteError(f'{what}; {tries}; fault_tolerance.non_finite = "skip" leaves such steps out')
        if self._in_row >= self._recipe.non_finite_limit:
            raise NonFiniteError(f"{what}; that is {self._in_row} in a row (fault_tolerance.non_finite_limit); {tries}")
        return policy


def bad_gradients(replica: Replica) -> list[str]:
    """The parameters here whose gradient holds an infinity or no number. One pass over the gradients."""
    gradients = {name: _local(each.grad) for name, each in replica.named_parameters() if each.grad is not None}
    if not gradients:
        return []
    # An infinity or no number makes a sum one, too, and sums are quick; a sum that merely overflows is looked into.
    if math.isfinite(torch.stack([gradient.sum().float() for gradient in gradients.values()]).sum()):
        return []
    return [name for name, gradient in gradients.items() if not torch.isfinite(gradient).all()]


def what_is_bad(step: int, loss: Tensor | None, gradients: list[str], group: dist.ProcessGroup | None = None) -> str:
    """One sentence on all ranks. Collective over the group, by default the world."""
    own = (None if loss is None else float(loss), len(gradients), gradients[:3], socket.gethostname(), dist.get_rank())
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group=group)
    # Gradients are averages by now: where a loss is bad, only its rank's say where it came from.
    sources = {rank for value, _, _, _, rank in found if value is not None and not math.isfinite(value)}
    parts = []
    for value, count, names, host, rank in found:
        of_loss = [f"loss {value}"] if rank in sources else []
        more = f" and {count - 3} more" if count > 3 else ""
        of_gradients = [f"gradients of {', '.join(names)}{more}"] if count else []
        if of_loss or (of_gradients and not sources):
            parts.append(f"rank {rank} ({host}): {' and '.join(of_loss + of_gradients)}")
    return f"step {step}: not finite: {'; '.join(parts)}"


def explain_device_error(error: Exception, step: int, batch: Batch | None) -> Exception | None:
    """The same failure in words that say where and what to try; None where there is nothing to add."""
    if "PeerLost" in f"{type(error).__name__} {error}":
        return None  # another rank's failure, in its own words
    rank = f"rank {dist.get_rank()} ({socket.gethostname()}): step {step}"
    sizes = "" if batch is None else f" with a batch of {', '.join(str(list(each.shape)) for each in _tensors(batch))}"
    if isinstance(error, BadExampleError):
        return BadExampleError(
            f'{rank}: {error}; repair the data, or fault_tolerance.missing_data = "skip" takes other training examples'
        )
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
        return DeviceError(
            f"{rank}{sizes}: out of memory: {_first_line(error)}; try a larger training.accumulate, a smaller "
            "training.batch, more ranks with parallel.zero = 3, or parallel.pipeline"
        )
    if isinstance(error, torch.AcceleratorError):
        return DeviceError(
            f"{rank}{sizes}: the device failed: {_first_line(error)}; take the host out of the job, or start it again"
        )
    return None


def abort_groups(mesh: Mesh, error: Exception) -> None:
    """They wait for this rank, which is leaving: their groups end now, with the reason, and not when it is gone."""
    groups: list[Any] = [dist.group.WORLD, *(axis.group for axis in (mesh.pipeline, mesh.data, mesh.tensor))]
    for group in groups:
        # Another backend's ranks notice that the process is gone.
        if hasattr(group, "netfold"):
            group.netfold.abort(str(error))


class Buffers:
    """A copy of what a forward pass changes beside gradients (running means): a step left out leaves nothing behind."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._buffers = [buffer for module in modules for buffer in module.buffers()]
        self._copies = [torch.empty_like(buffer) for buffer in self._buffers]

    def save(self) -> None:
        for copy, buffer in zip(self._copies, self._buffers, strict=True):
            copy.copy_(buffer)

    def restore(self) -> None:
        with torch.no_grad():
            for copy, buffer in zip(self._copies, self._buffers, strict=True):
                buffer.copy_(copy)


def _local(gradient: Tensor) -> Tensor:
    gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return gradient._values() if gradient.is_sparse else gradient


def _tensors(batch: Batch) -> tuple[Tensor, ...]:
    return (*batch.inputs, batch.target)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
