"""The number formats that gradients travel in."""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """Interface: `compress` gives a tensor to send and what `decompress` needs to give the tensor back."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        raise NotImplementedError


class NoneCompressor(Compressor):
    """The tensor as it is."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class _Cast(Compressor):
    """Floating-point tensors in another dtype; sums are rounded to it."""

    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor.to(cls.dtype) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


class FP16Compressor(_Cast):
    """f16: 11 bits, and no value above 65504."""

    dtype = torch.float16


class BF16Compressor(_Cast):
    """bf16: 8 bits, and the range of f32. Horovod itself has no such compressor."""

    dtype = torch.bfloat16


class Compression:
    """The compressors that `allreduce` and `DistributedOptimizer` take; any object with their two methods fits too."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
