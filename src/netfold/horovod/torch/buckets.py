"""Gradients that travel together, and when they do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from netfold.communicator import empty
from netfold.horovod.torch.compression import BF16Compressor, FP16Compressor, NoneCompressor
from netfold.horovod.torch.handles import Average, Handle, synchronize
from netfold.horovod.torch.process_sets import ProcessSet
from netfold.horovod.torch.reductions import begin

Tensor = torch.Tensor

# The first bucket is ready early in the backward pass, so that the network has something to do soon.
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20

_CASTS: dict[Any, torch.dtype | None] = {
    NoneCompressor: None,
    FP16Compressor: torch.float16,
    BF16Compressor: torch.bfloat16,
}


class Bucket:
    """Parameters whose gradients are one operation."""

    def __init__(self, name: str, params: Sequence[Tensor], names: dict[Tensor, str]) -> None:
        self.name = name
        self.params = list(params)
        self.ready = 0  # of them, in this step
        self.handle: Handle | None = None
        self._names = names
        self._contexts: list[Any] = []
        self._flat: Tensor | None = None
        self._places: Sequence[Tensor] = ()

    def remove(self, param: Tensor) -> None:
        """Its gradients are sparse, and travel alone."""
        self.params = [each for each in self.params if each is not param]
        self._flat = None

    def launch(self, compression: Any, op: str, predivide: float, process_set: ProcessSet) -> None:
        """Begin the allreduce of all gradients; a parameter without one sends zeros."""
        for param in self.params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        gradients = [_dense(param.grad) for param in self.params]
        options = (op, 1 / predivide, predivide) if op == Average else (op, 1.0, 1.0)
        members = tuple(self._names[param] for param in self.params)
        flat = self._flat_for(gradients, compression)
        if flat is not None:
            torch._foreach_copy_(list(self._places), [each.reshape(-1) for each in gradients])
            tensors = [flat]
        else:
            compressed = [compression.compress(each) for each in gradients]
            tensors = [each for each, _ in compressed]
            self._contexts = [ctx for _, ctx in compressed]
        self.handle = begin(tensors, tensors, None, self.name, *options, process_set, True, list, members)

    def finish(self, compression: Any) -> None:
        """Wait, and put the results into the gradients."""
        assert self.handle is not None
        handle, self.handle, self.ready = self.handle, None, 0
        reduced = synchronize(handle)
        gradients = [param.grad for param in self.params if param.grad is not None]
        with torch.no_grad():
            if self._flat is not None:
                parts = [place.view(each.shape) for place, each in zip(self._places, gradients, strict=True)]
            else:
                pairs = zip(reduced, self._contexts, strict=True)
                parts = [compression.decompress(each, ctx) for each, ctx in pairs]
            if any(each.is_sparse for each in gradients):
                for gradient, part in zip(gradients, parts, strict=True):
                    gradient.zero_().add_(part.to_sparse() if gradient.is_sparse else part)
            else:
                torch._foreach_copy_(gradients, parts)

    def _flat_for(self, gradients: Sequence[Tensor], compression: Any) -> Tensor | None:
        """One buffer for all of them, where they have one dtype on the host and travel as one of our own compressors
        says; kept from step to step, in memory that ranks of one machine share."""
        first = gradients[0]
        known = compression in _CASTS and all(each.dtype == first.dtype and each.is_cpu for each in gradients)
        if not known:
            self._flat = None
            return None
        dtype = _CASTS[compression] if first.is_floating_point() else None
        dtype = dtype or first.dtype
        if self._flat is None or self._flat.dtype != dtype:
            sizes = [each.numel() for each in gradients]
            self._flat = torch.from_numpy(empty(sum(sizes) * dtype.itemsize, "u1")).view(dtype)
            self._places = torch.split(self._flat, sizes)
        return self._flat


def _dense(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.to_dense() if gradient.is_sparse else gradient


def plan(params: Iterable[Tensor], names: dict[Tensor, str], prefix: str) -> list[Bucket]:
    """Buckets in the order in which a backward pass is likely to need them: from the last parameter to the first.

    The same on every rank whose optimizer lists the same parameters in the same order; where they do not, the first
    step says so on all ranks.
    """
    buckets: list[list[Tensor]] = []
    open_: dict[Any, list[Tensor]] = {}
    used: dict[Any, int] = {}
    for param in reversed(list(params)):
        kind = (param.dtype, param.device)
        limit = FIRST_BUCKET_BYTES if len(buckets) <= 1 else BUCKET_BYTES
        if kind not in open_ or used[kind] + param.nbytes > limit:
            open_[kind], used[kind] = [], 0
            buckets.append(open_[kind])
        open_[kind].append(param)
        used[kind] += param.nbytes
    return [Bucket(f"{prefix}.{number}", each, names) for number, each in enumerate(buckets)]


__all__ = ["Bucket", "plan"]
