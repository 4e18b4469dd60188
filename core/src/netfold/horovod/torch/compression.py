"""The number formats in which gradients travel."""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """Converts floating-point tensors to `dtype` for an operation, and back. Sums are rounded to `dtype`."""

    dtype: torch.dtype | None = None  # None: unchanged

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor to send, and the context that `decompress` needs."""
        return (tensor.to(cls.dtype) if cls.dtype and tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


class FP16Compressor(Compressor):
    """f16: 11 bits of precision, values up to 65504."""

    dtype = torch.float16


class BF16Compressor(Compressor):
    """bf16: 8 bits of precision, the range of f32. Horovod has no such compressor."""

    dtype = torch.bfloat16


class Compression:
    """The compressors for `allreduce` and `DistributedOptimizer`. Any object with the same two methods works, too."""

    none = Compressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
