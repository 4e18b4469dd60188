"""Batch norm over sub-groups of ranks: data-parallel ranks in runs of k normalise as one batch.

torch's own (SyncBatchNorm) is for CUDA alone.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from netfold.train.mesh import Mesh
from netfold.train.recipe import constraints
from netfold.train.recipe.errors import RecipeError


def convert_batch_norm(module: nn.Module, ranks: int, mesh: Mesh) -> None:
    """Put a SubGroupBatchNorm in the place of every nn.BatchNorm*d inside `module`, over runs of `ranks` data-parallel
    ranks. Collective over the world: makes groups. Parameters and buffers stay the same objects, names too."""
    if said := constraints.batch_norm(ranks, mesh.data.size):
        raise RecipeError(said)
    found = norms_of(module, ranks)
    group = _run_of(ranks, mesh)
    for parent, name, child in found:
        setattr(parent, name, SubGroupBatchNorm.of(child, group))


def norms_of(module: nn.Module, ranks: int) -> list[tuple[nn.Module, str, _BatchNorm]]:
    """Each nn.BatchNorm*d inside `module`, with the module and the name that it has there. ValueError where there is
    none to normalise over `ranks`."""
    found: list[tuple[nn.Module, str, _BatchNorm]] = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if isinstance(child, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))
    ]
    if not found:
        raise ValueError(f"parallel.batch_norm is {ranks}, but the model has no layer of batch norm; leave it at 1")
    return found


class SubGroupBatchNorm(_BatchNorm):
    """Batch norm of the batches of all ranks of a group together; [n, c, ...] f64, f32 or bf16, n its own on each rank.

    Means and variances are taken in f32 at least, and merged in f64 (Chan, Golub, LeVeque 1979): one all_gather of
    2c + 1 numbers a rank forward, one all_reduce of 2c backward. In training every rank of the group must come by, in
    forward and backward. Weights' gradients are those of this rank's samples: DDP takes their mean. In evaluation, and
    running statistics: as nn.BatchNorm2d; with the latter off, evaluation normalises by this rank's batch.
    Raises ValueError where the ranks have one value a channel together.
    """

    group: dist.ProcessGroup

    @classmethod
    def of(cls, norm: _BatchNorm, group: dist.ProcessGroup) -> SubGroupBatchNorm:
        """With the parameters and buffers of `norm`, which is not to be used any more."""
        made = cls(norm.num_features, norm.eps, norm.momentum, affine=False, track_running_stats=False)
        made.affine, made.track_running_stats, made.training = norm.affine, norm.track_running_stats, norm.training
        made.weight, made.bias = norm.weight, norm.bias
        made.running_mean, made.running_var = norm.running_mean, norm.running_var
        made.num_batches_tracked = norm.num_batches_tracked
        made.group = group
        return made

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"batch norm takes [n, c, ...], and got {list(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training:
            return functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias,
                training=self.running_mean is None, eps=self.eps,
            )  # fmt: skip
        output, mean, variance, count = cast(
            tuple[Tensor, Tensor, Tensor, Tensor],
            _Normalise.apply(input, self.weight, self.bias, self.eps, self.group),  # type: ignore[no-untyped-call]
        )
        if self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
                unbiased = variance * (count / (count - 1))
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)
        return output


class _Normalise(torch.autograd.Function):
    """(x, weight, bias) -> x normalised by the group's statistics; and those: mean, biased variance, values a channel,
    in f64."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x.to(_wide(x))
        mean, variance, count = _merged(wide, group)
        if count <= 1:
            raise ValueError(f"batch norm in training needs more than one value a channel, and {list(x.shape)} has not")
        shift, scale = mean.to(wide.dtype), (variance + eps).rsqrt().to(wide.dtype)
        normal = (wide - _by_channel(shift, x)) * _by_channel(scale, x)
        ctx.save_for_backward(normal, scale, weight, count)
        ctx.group, ctx.needs_bias = group, bias is not None
        output = normal if weight is None else normal * _by_channel(weight.to(wide.dtype), x)
        if bias is not None:
            output = output + _by_channel(bias.to(wide.dtype), x)
        # What is saved must not be what is returned.
        output = output.clone() if output is normal else output
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(x.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        normal, scale, weight, count = ctx.saved_tensors
        wide = gradient.to(normal.dtype)
        over = [dimension for dimension in range(wide.ndim) if dimension != 1]
        # of dy, and of dy x the normalised x: the gradients of bias and weight here, and what x's needs of everybody
        sums = torch.stack([wide.sum(over), (wide * normal).sum(over)])
        all_sums = sums.to(torch.float64, copy=True)
        dist.all_reduce(all_sums, group=ctx.group)
        means = (all_sums / count).to(wide.dtype)
        gradient_x = wide - _by_channel(means[0], wide) - normal * _by_channel(means[1], wide)
        gradient_x *= _by_channel(scale if weight is None else scale * weight.to(wide.dtype), wide)
        gradient_weight = None if weight is None else sums[1].to(weight.dtype)
        gradient_bias = sums[0].to(weight.dtype) if ctx.needs_bias else None
        return gradient_x.to(gradient.dtype), gradient_weight, gradient_bias, None, None


def _merged(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance a channel of the batches of all ranks, [c], and the values a channel, []; all f64."""
    channels = x.shape[1]
    here = torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
    if x.numel():
        over = [dimension for dimension in range(x.ndim) if dimension != 1]
        variance, mean = torch.var_mean(x, over, correction=0)
        here[:channels], here[channels:-1], here[-1] = mean, variance, x.numel() // channels
    everywhere = here.new_empty(group.size(), len(here))
    dist.all_gather(list(everywhere.unbind()), here, group=group)
    means, variances, counts = everywhere[:, :channels], everywhere[:, channels:-1], everywhere[:, -1:]
    count = counts.sum()
    mean = (means * counts).sum(0) / count
    variance = ((variances + (means - mean).square()) * counts).sum(0) / count
    return mean, variance, count


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _by_channel(of_channel: Tensor, x: Tensor) -> Tensor:
    return of_channel.view(1, -1, *[1] * (x.ndim - 2))


def _run_of(ranks: int, mesh: Mesh) -> dist.ProcessGroup:
    """This rank's group: `ranks` neighbours on the data axis. New ones even where the whole axis is one run: what DDP
    has under way on the axis's own group must not mix with what a layer asks for in between."""
    own = None
    for line in mesh.device_mesh.mesh.movedim(1, -1).reshape(-1, ranks).tolist():
        group = dist.new_group(line)
        own = group if dist.get_rank() in line else own
    assert own is not None
    return cast(dist.ProcessGroup, own)
