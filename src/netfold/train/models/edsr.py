"""EDSR: residual blocks without batch norm, a skip over all of them, pixel shuffle (Lim et al., CVPRW 2017).

Two tensors pass through the chain beside the features: the head's features, which the end of the body adds, and the
input's bicubic enlargement, to which the network adds detail (as in VDSR, Kim et al., CVPR 2016). The last convolution
starts at 0, so the untrained network is bicubic enlargement, and spends no steps on learning it.
"""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from netfold.train.data.resolution import bicubic
from netfold.train.models.model import Chain, Model

Scale = Literal[2, 3, 4]


def baseline(scale: Scale = 2) -> Model:
    """The paper's small model: 16 blocks of 64 features, 1.4 million parameters at x2."""
    return edsr(features=64, blocks=16, scale=scale)


def large(scale: Scale = 2) -> Model:
    """The paper's best model: 32 blocks of 256 features, residuals scaled by 0.1, 40.7 million parameters at x2."""
    return edsr(features=256, blocks=32, scale=scale, residual_scale=0.1)


def edsr(features: int = 64, blocks: int = 16, scale: Scale = 2, residual_scale: float = 1.0) -> Model:
    """Low resolution [n, 3, h, w] -> [n, 3, scale h, scale w], f32, about 0..1.

    scale: equal to the data's. residual_scale: the factor of each block's residual, which keeps many
    features from growing without bound (section 3.3).
    """
    layers: list[tuple[str, nn.Module]] = [("head", Head(features, scale))]
    layers += [(f"block{number}", Block(features, residual_scale)) for number in range(blocks)]
    layers += [("tail", Tail(features, scale))]
    return Model(Chain(layers), lambda output, truth: functional.l1_loss(output, truth, reduction="none"))


class Head(nn.Module):
    """low -> (features, the same features for the tail's skip, the bicubic enlargement)."""

    def __init__(self, features: int, scale: int) -> None:
        super().__init__()
        self.scale = scale
        self.conv = _conv(3, features)

    def forward(self, low: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = self.conv(low)
        # Always f32: torch has this kernel for f32 only, and the output keeps f32's resolution.
        return features, features, bicubic(low.float(), self.scale)


class Block(nn.Module):
    """x + residual_scale conv(relu(conv(x))). With a scale of 1 the second convolution has small initial weights.

    These are enough for few features, and keep the first steps from amplifying rounding differences between two runs.
    """

    def __init__(self, features: int, residual_scale: float) -> None:
        super().__init__()
        self.residual_scale = residual_scale
        self.first = _conv(features, features)
        self.second = _conv(features, features)
        nn.init.zeros_(cast(Tensor, self.second.bias))
        if residual_scale == 1.0:
            with torch.no_grad():
                self.second.weight.mul_(0.1)

    def forward(self, x: Tensor, skip: Tensor, large: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        detail = self.second(functional.relu(self.first(x)))
        return torch.add(x, detail, alpha=self.residual_scale), skip, large


class Tail(nn.Module):
    """The body's last convolution, and the additions of both skips."""

    def __init__(self, features: int, scale: int) -> None:
        super().__init__()
        self.body = _conv(features, features)
        factors = [2, 2] if scale == 4 else [scale]
        self.upsample = nn.Sequential(
            *(layer for by in factors for layer in (_conv(features, features * by**2), nn.PixelShuffle(by)))
        )
        self.last = _conv(features, 3)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(cast(Tensor, self.last.bias))

    def forward(self, x: Tensor, skip: Tensor, large: Tensor) -> Tensor:
        return large + cast(Tensor, self.last(self.upsample(skip + self.body(x))))


def _conv(inputs: int, outputs: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel_size=3, padding=1)
