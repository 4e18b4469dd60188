"""A DDP model's gradients as i8, with error feedback: a step's rounding error is added to the next gradient.

A residual (the rounding error) belongs to a parameter, not to an address. DDP rebuilds its buckets after the first
step; the residuals follow, parameter by parameter.
"""

from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from netfold.torch.operations import Operations, operations_of

Tensor = torch.Tensor


class _Bucket(NamedTuple):
    parameters: list[Tensor]
    residual: Tensor


class GradientCompression:
    """The residuals of one model's gradients on this rank."""

    def __init__(self, uncompressed: Operations, compressed: Operations | None) -> None:
        """Begin with residuals of 0.

        uncompressed: the model's group, for gradients that are not f32.
        compressed: a group of the same ranks with i8 as wire dtype; None on one rank.
        """
        self._uncompressed = uncompressed
        self._compressed = compressed
        self._buckets: dict[int, _Bucket] = {}
        # By parameter: views of the buckets' residuals.
        self._residuals: dict[Tensor, Tensor] = {}

    def residual(self, parameter: Tensor) -> Tensor:
        """The residual of `parameter`: its shape, f32, in units of this rank's own gradient. Valid until the next step.

        Zeros before the first step.
        """
        residual = self._residuals.get(parameter)
        if residual is None:
            return torch.zeros_like(parameter)
        # A gradient in a DDP bucket has its parameter's strides (channels_last, for example).
        return residual.as_strided(parameter.shape, parameter.stride(), residual.storage_offset())

    def residual_of(self, bucket: GradBucket) -> Tensor:
        """The residual of all parameters of the bucket, as long as the bucket."""
        parameters = bucket.parameters()
        known = self._buckets.get(bucket.index())
        if known is not None and _same(known.parameters, parameters):
            return known.residual
        residual = torch.zeros_like(bucket.buffer())
        for parameter, part in zip(
            parameters, torch.split(residual, [each.numel() for each in parameters]), strict=True
        ):
            if parameter in self._residuals:
                part.copy_(self._residuals[parameter])
            self._residuals[parameter] = part
        self._buckets[bucket.index()] = _Bucket(parameters, residual)
        return residual

    def average(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        if self._compressed is None or buffer.dtype is not torch.float32:
            return self._uncompressed.average(buffer)
        return self._compressed.average(buffer, self.residual_of(bucket))


def _same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))


# DDP checks a hook's annotations against its own types, so this file must not postpone annotations.
def _average(state: GradientCompression, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    return state.average(bucket)


def compress(model: DistributedDataParallel, uncompressed: Operations) -> GradientCompression:
    """See `netfold.torch.compress_gradients`."""
    compressed = None
    if uncompressed.netfold.size > 1:
        group = dist.new_group(
            dist.get_process_group_ranks(model.process_group),
            backend="netfold",
            timeout=timedelta(seconds=uncompressed.netfold.timeout_s),
            pg_options=replace(uncompressed.netfold.options, wire_dtype="i8"),
            use_local_synchronization=True,
            group_desc="gradients as i8",
        )
        compressed = operations_of(group)
        assert compressed is not None
    state = GradientCompression(uncompressed, compressed)
    model.register_comm_hook(state, _average)
    return state
