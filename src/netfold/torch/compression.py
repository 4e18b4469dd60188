"""A DDP model's gradients as i8, with error feedback: what rounding took from a step goes into the next.

A residual belongs to a parameter of one model, not to a place in memory. DDP lays its buckets out anew after the first
step: the residuals move along, parameter by parameter.
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
    """What one model's gradients have lost on their way and not made up for yet, on this rank."""

    def __init__(self, whole: Operations, compressed: Operations | None) -> None:
        """`whole`: the model's group, for gradients that are no f32; `compressed`: one of the same ranks whose wire is
        i8, None where there is one rank."""
        self._whole = whole
        self._compressed = compressed
        self._buckets: dict[int, _Bucket] = {}
        # Views of the buckets' residuals.
        self._lost: dict[Tensor, Tensor] = {}

    def residual(self, parameter: Tensor) -> Tensor:
        """[as the parameter] f32, in units of this rank's own gradient; zeros before the first step. Borrowed: good
        until the next step."""
        found = self._lost.get(parameter)
        if found is None:
            return torch.zeros_like(parameter)
        # DDP lays a gradient out as its parameter (channels_last, say).
        return found.as_strided(parameter.shape, parameter.stride(), found.storage_offset())

    def residual_of(self, bucket: GradBucket) -> Tensor:
        """As long as the bucket, and what its parameters lost in earlier steps."""
        parameters = bucket.parameters()
        known = self._buckets.get(bucket.index())
        if known is not None and _same(known.parameters, parameters):
            return known.residual
        residual = torch.zeros_like(bucket.buffer())
        for parameter, part in zip(
            parameters, torch.split(residual, [each.numel() for each in parameters]), strict=True
        ):
            if parameter in self._lost:
                part.copy_(self._lost[parameter])
            self._lost[parameter] = part
        self._buckets[bucket.index()] = _Bucket(parameters, residual)
        return residual

    def average(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        if self._compressed is None or buffer.dtype is not torch.float32:
            return self._whole.average(buffer)
        return self._compressed.average(buffer, self.residual_of(bucket))


def _same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))


# DDP reads a hook's annotations and wants its own types there: they must not be postponed in this file.
def _average(state: GradientCompression, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    return state.average(bucket)


def compress(model: DistributedDataParallel, whole: Operations) -> GradientCompression:
    """See `netfold.torch.compress_gradients`."""
    compressed = None
    if whole.netfold.size > 1:
        group = dist.new_group(
            dist.get_process_group_ranks(model.process_group),
            backend="netfold",
            timeout=timedelta(seconds=whole.netfold.timeout_s),
            pg_options=replace(whole.netfold.options, wire_dtype="i8"),
            use_local_synchronization=True,
            group_desc="gradients as i8",
        )
        compressed = operations_of(group)
        assert compressed is not None
    state = GradientCompression(whole, compressed)
    model.register_comm_hook(state, _average)
    return state
