"""Gradients that are reduced together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from netfold.communicator import empty
from netfold.horovod.fusion import batches
from netfold.horovod.torch.compression import BF16Compressor, Compressor, FP16Compressor
from netfold.horovod.torch.execution import Handle
from netfold.horovod.torch.operations import Average, begin_allreduce
from netfold.horovod.torch.world import ProcessSet

Tensor = torch.Tensor

# The first bucket is complete early in the backward pass, so the network has work early.
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20


class Bucket:
    """Parameters whose gradients are reduced by one operation."""

    def __init__(self, name: str, params: Sequence[Tensor], names: dict[Tensor, str]) -> None:
        self.name = name
        self.params = list(params)
        self.ready = 0  # the number of gradients that this step has computed
        self.handle: Handle | None = None
        self._names = names
        self._contexts: list[Any] = []
        self._flat: Tensor | None = None
        self._parts: Sequence[Tensor] = ()

    def remove(self, param: Tensor) -> None:
        """Remove a parameter with sparse gradients, which are reduced alone."""
        self.params = [each for each in self.params if each is not param]
        self._flat = None

    def launch(self, compression: Any, op: str, predivide: float, process_set: ProcessSet) -> None:
        """Begin the allreduce of all gradients. A parameter without a gradient sends zeros."""
        for param in self.params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        gradients = [_dense(param.grad) for param in self.params]
        factors = (1 / predivide, predivide) if op == Average else (1.0, 1.0)
        members = tuple(self._names[param] for param in self.params)
        self._flat = self._flat_for(gradients, compression)
        if self._flat is not None:
            torch._foreach_copy_(list(self._parts), [each.reshape(-1) for each in gradients])
            tensors = [self._flat]
        else:
            compressed = [compression.compress(each) for each in gradients]
            tensors = [each for each, _ in compressed]
            self._contexts = [ctx for _, ctx in compressed]
        self.handle = begin_allreduce(tensors, tensors, self.name, op, *factors, process_set, True, members)

    def finish(self, compression: Any) -> None:
        """Wait for the allreduce, and copy its results into the gradients."""
        assert self.handle is not None
        handle, self.handle, self.ready = self.handle, None, 0
        reduced = handle.wait()
        gradients = [param.grad for param in self.params if param.grad is not None]
        with torch.no_grad():
            if self._flat is not None:
                parts = [part.view(each.shape) for part, each in zip(self._parts, gradients, strict=True)]
            else:
                pairs = zip(reduced, self._contexts, strict=True)
                parts = [compression.decompress(each, ctx) for each, ctx in pairs]
            if any(each.is_sparse for each in gradients):
                for gradient, part in zip(gradients, parts, strict=True):
                    gradient.zero_().add_(part.to_sparse() if gradient.is_sparse else part)
            else:
                torch._foreach_copy_(gradients, parts)

    def _flat_for(self, gradients: Sequence[Tensor], compression: Any) -> Tensor | None:
        """Return one buffer for all gradients; None if they have several dtypes, a device, or a user's compressor.

        The buffer is kept for later steps. Its memory is shared among the ranks of a machine.
        """
        first = gradients[0]
        known = compression in (Compressor, FP16Compressor, BF16Compressor)
        if not known or not all(each.dtype == first.dtype and each.is_cpu for each in gradients):
            return None
        dtype = compression.dtype if compression.dtype and first.is_floating_point() else first.dtype
        if self._flat is not None and self._flat.dtype == dtype:
            return self._flat
        sizes = [each.numel() for each in gradients]
        flat = torch.from_numpy(empty(sum(sizes) * dtype.itemsize, "u1")).view(dtype)
        self._parts = torch.split(flat, sizes)
        return flat


def _dense(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.to_dense() if gradient.is_sparse else gradient


def plan(params: Iterable[Tensor], names: dict[Tensor, str], prefix: str) -> list[Bucket]:
    """Make buckets in the order in which a backward pass probably needs them: from the last parameter to the first.

    All ranks make the same buckets if their optimizers list the same parameters in the same order. If not, the first
    step raises on all ranks.
    """
    backward = list(params)[::-1]
    found = batches(
        [(param.dtype, param.device) for param in backward],
        [param.nbytes for param in backward],
        lambda count: FIRST_BUCKET_BYTES if count <= 1 else BUCKET_BYTES,
    )
    return [
        Bucket(f"{prefix}.{number}", [backward[index] for index in indices], names)
        for number, indices in enumerate(found)
    ]
