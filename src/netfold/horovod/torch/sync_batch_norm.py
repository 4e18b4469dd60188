"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from netfold.horovod.torch.operations import Sum, allreduce_
from netfold.horovod.torch.world import size

Tensor = torch.Tensor

# Ranks make their layers in the same order. The names of a layer's operations contain its number.
_numbers = itertools.count()


class SyncBatchNorm(_BatchNorm):
    """`torch.nn.BatchNorm*d` that computes its statistics in training over the batches of all ranks, of any sizes.

    Cost: two small allreduces for each layer and step: sums and counts in the forward pass, two sums in the backward
    pass. Horovod's own layer takes GPU tensors only; this layer takes any.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self._name = f"sync_batch_norm.{next(_numbers)}"

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"the input needs a batch and a channel dimension; its shape is {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalize `input`, [N, C, ...]. Returns the same shape."""
        batch_statistics = self.training or not self.track_running_stats
        if not batch_statistics or size() == 1:
            plain: Tensor = super().forward(input)
            return plain
        self._check_input_dim(input)
        normalize: Any = _Normalize.apply
        output: Tensor
        output, mean, variance, count = normalize(input, self.weight, self.bias, self.eps, self._name)
        if self.training and self.track_running_stats:
            self._track(mean, variance, float(count))
        return output

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: float) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / max(count - 1, 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Any, bias: Any, eps: float, name: str) -> Any:
        channels = input.size(1)
        over = [dim for dim in range(input.dim()) if dim != 1]
        wide = input.detach().double()  # f64: a variance is a small difference of large sums
        sums = torch.cat([wide.sum(over), wide.square().sum(over), wide.new_tensor([input.numel() / channels])])
        allreduce_(sums, op=Sum, name=f"{name}.forward")
        count = sums[-1]
        mean = sums[:channels] / count
        variance = (sums[channels:-1] / count - mean.square()).clamp_(min=0)
        invstd = (variance + eps).rsqrt()
        shape = [1, channels] + [1] * (input.dim() - 2)
        normalized = (input - mean.to(input.dtype).view(shape)) * invstd.to(input.dtype).view(shape)
        ctx.save_for_backward(normalized, weight, invstd, count)
        ctx.name, ctx.over, ctx.shape = name, over, shape
        ctx.mark_non_differentiable(mean, variance, count)
        output = normalized if weight is None else normalized * weight.view(shape) + bias.view(shape)
        return output.clone() if output is normalized else output, mean, variance, count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *unused: Any) -> Any:
        normalized, weight, invstd, count = ctx.saved_tensors
        over, shape = ctx.over, ctx.shape
        by_bias = gradient.sum(over)
        by_weight = (gradient * normalized).sum(over)
        by_input = None
        if ctx.needs_input_grad[0]:
            sums = torch.cat([by_bias, by_weight]).double()
            allreduce_(sums, op=Sum, name=f"{ctx.name}.backward")
            mean_of_gradient, mean_of_product = (sums / count).to(gradient.dtype).chunk(2)
            scale = invstd.to(gradient.dtype) * (1 if weight is None else weight)
            inner = gradient - mean_of_gradient.view(shape) - normalized * mean_of_product.view(shape)
            by_input = inner * scale.view(shape)
        if weight is None:
            return by_input, None, None, None, None
        return by_input, by_weight, by_bias, None, None
