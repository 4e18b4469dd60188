"""Batch norm over the batches of several ranks, which torch has for CUDA only.

May use: torch alone. Always: no rank's samples count more than another rank's, whatever each rank's batch.
Tests: `pytest train/tests/train/test_batch_norm.py core/tests/horovod`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm


class SharedBatchNorm(_BatchNorm, ABC):
    """Batch norm of the batches of several ranks together.

    Input: [n, c, ...] f64, f32 or bf16; n may differ between ranks. Means and variances are computed in f32 or more,
    and merged in f64 (Chan, Golub, LeVeque 1979).
    Cost: an all_gather of 2c + 1 numbers per rank forward, an all_reduce of 2c backward. In training both passes are
    collective. Gradients of weight and bias are of this rank's samples. Evaluation and running statistics are those of
    nn.BatchNorm2d; without running statistics, evaluation normalises by this rank's batch. Raises ValueError if the
    ranks together have only one value per channel.
    """

    @abstractmethod
    def gather(self, own: Tensor) -> Tensor:
        """[k] of this rank -> [ranks, k]."""

    @abstractmethod
    def add(self, own: Tensor) -> None:
        """Replace `own` by its sum over the ranks."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"batch norm takes [n, c, ...], and got {list(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        return self.normalise(input) if self.training else super().forward(input)

    def normalise(self, input: Tensor) -> Tensor:
        """The input, normalised by the statistics of all ranks' batches, which running statistics take in."""
        self._check_input_dim(input)
        output, mean, variance, count = cast(
            tuple[Tensor, Tensor, Tensor, Tensor],
            _Normalise.apply(input, self.weight, self.bias, self.eps, self),  # type: ignore[no-untyped-call]
        )
        if self.training and self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
                unbiased = variance * (count / (count - 1))
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)
        return output


class _Normalise(torch.autograd.Function):
    """(x, weight, bias) -> (x normalised by all ranks' statistics, mean, biased variance, values per channel).

    The statistics are f64.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, layer: SharedBatchNorm
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x.to(_wide(x))
        mean, variance, count = _merged(wide, layer)
        if count <= 1:
            raise ValueError(f"batch norm in training needs several values per channel; {list(x.shape)} has one")
        shift, scale = mean.to(wide.dtype), (variance + eps).rsqrt().to(wide.dtype)
        normal = (wide - _by_channel(shift, x)) * _by_channel(scale, x)
        ctx.save_for_backward(normal, scale, weight, count)
        ctx.layer = layer
        if weight is None or bias is None:
            # The saved tensor must not be the returned tensor.
            output = normal.clone()
        else:
            output = normal * _by_channel(weight.to(wide.dtype), x) + _by_channel(bias.to(wide.dtype), x)
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(x.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        normal, scale, weight, count = ctx.saved_tensors
        wide = gradient.to(normal.dtype)
        over = [dimension for dimension in range(wide.ndim) if dimension != 1]
        # The sums of dy and of dy times the normalised x: this rank's gradients of bias and weight. Their sums over
        # all ranks enter the gradient of x.
        sums = torch.stack([wide.sum(over), (wide * normal).sum(over)])
        all_sums = sums.to(torch.float64, copy=True)
        ctx.layer.add(all_sums)
        means = (all_sums / count).to(wide.dtype)
        gradient_x = wide - _by_channel(means[0], wide) - normal * _by_channel(means[1], wide)
        gradient_x *= _by_channel(scale if weight is None else scale * weight.to(wide.dtype), wide)
        gradient_bias, gradient_weight = (None, None) if weight is None else sums.to(weight.dtype)
        return gradient_x.to(gradient.dtype), gradient_weight, gradient_bias, None, None


def _merged(x: Tensor, layer: SharedBatchNorm) -> tuple[Tensor, Tensor, Tensor]:
    """Mean [c], biased variance [c] and values per channel [] of the batches of all ranks; f64."""
    channels = x.shape[1]
    here = torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
    if x.numel():
        over = [dimension for dimension in range(x.ndim) if dimension != 1]
        variance, mean = torch.var_mean(x, over, correction=0)
        here[:channels], here[channels:-1], here[-1] = mean, variance, x.numel() // channels
    everywhere = layer.gather(here)
    means, variances, counts = everywhere[:, :channels], everywhere[:, channels:-1], everywhere[:, -1:]
    count = counts.sum()
    mean = (means * counts).sum(0) / count
    variance = ((variances + (means - mean).square()) * counts).sum(0) / count
    return mean, variance, count


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _by_channel(of_channel: Tensor, x: Tensor) -> Tensor:
    return of_channel.view(1, -1, *[1] * (x.ndim - 2))
