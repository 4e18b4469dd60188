"""EDSR: residual blocks without batch norm, a skip over all of them, pixel shuffle (Lim et al., CVPRW 2017).

`edsr-paper` is the paper's network: the mean colour of DIV2K is taken off the input and added to the output, and
weights start as torch's. The head's features, which the end of the body adds, pass through the chain beside the
features.

`edsr` is a variant, which learns faster in few steps. The input's bicubic enlargement passes through the chain too, and
the network adds detail to it (as in VDSR, Kim et al., CVPR 2016). The last convolution starts at 0, so the untrained
network is bicubic enlargement, and spends no steps on learning it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from netfold_train.models.model import Chain, Model
from netfold_train.zoo.data.resolution import bicubic

Scale = Literal[2, 3, 4]
MEAN_COLOUR = (0.4488, 0.4371, 0.4040)
"""Red, green and blue of DIV2K, 0..1, as in the paper's published code."""


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
    parts = [DetailBlock(features, residual_scale) for _ in range(blocks)]
    return _model(Head(features, scale), parts, DetailTail(features, scale))


def paper(scale: Scale = 2) -> Model:
    """Section 3.3's baseline: 16 blocks of 64 features. Input and output as in `edsr`."""
    parts = [Block(64, 1.0) for _ in range(16)]
    return _model(ShiftedHead(64), parts, ShiftedTail(64, scale))


def paper_large(scale: Scale = 2) -> Model:
    """Section 3.3's best network: 32 blocks of 256 features, residuals scaled by 0.1. Otherwise as `paper`."""
    parts = [Block(256, 0.1) for _ in range(32)]
    return _model(ShiftedHead(256), parts, ShiftedTail(256, scale))


def _model(head: nn.Module, blocks: Sequence[nn.Module], tail: nn.Module) -> Model:
    layers = [("head", head), *((f"block{number}", block) for number, block in enumerate(blocks)), ("tail", tail)]
    return Model(Chain(layers), lambda output, truth: functional.l1_loss(output, truth, reduction="none"))


class Shift(nn.Module):
    """Adds `factor` times the mean colour to pictures [n, 3, h, w]."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, picture: Tensor) -> Tensor:
        return picture + self.factor * picture.new_tensor(MEAN_COLOUR).view(3, 1, 1)


class ShiftedHead(nn.Module):
    """low -> (features, the same features for the tail's skip)."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.shift = Shift(-1.0)
        self.conv = _conv(3, features)

    def forward(self, low: Tensor) -> tuple[Tensor, Tensor]:
        features = self.conv(self.shift(low))
        return features, features


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
    """x + residual_scale conv(relu(conv(x))); other tensors pass through."""

    def __init__(self, features: int, residual_scale: float) -> None:
        super().__init__()
        self.residual_scale = residual_scale
        self.first = _conv(features, features)
        self.second = _conv(features, features)

    def forward(self, x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        detail = self.second(functional.relu(self.first(x)))
        return torch.add(x, detail, alpha=self.residual_scale), *others


class DetailBlock(Block):
    """With a scale of 1 the second convolution has small initial weights.

    These are enough for few features, and keep the first steps from amplifying rounding differences between two runs.
    """

    def __init__(self, features: int, residual_scale: float) -> None:
        super().__init__(features, residual_scale)
        nn.init.zeros_(cast(Tensor, self.second.bias))
        if residual_scale == 1.0:
            with torch.no_grad():
                self.second.weight.mul_(0.1)


class Tail(nn.Module):
    """(features, the head's features) -> picture: the body's last convolution, its skip, and the enlargement."""

    def __init__(self, features: int, scale: int) -> None:
        super().__init__()
        self.body = _conv(features, features)
        factors = [2, 2] if scale == 4 else [scale]
        self.upsample = nn.Sequential(
            *(layer for by in factors for layer in (_conv(features, features * by**2), nn.PixelShuffle(by)))
        )
        self.last = _conv(features, 3)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        picture: Tensor = self.last(self.upsample(skip + self.body(x)))
        return picture


class ShiftedTail(Tail):
    def __init__(self, features: int, scale: int) -> None:
        super().__init__(features, scale)
        self.shift = Shift(1.0)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        picture: Tensor = self.shift(super().forward(x, skip))
        return picture


class DetailTail(Tail):
    """(features, the head's features, the bicubic enlargement) -> the enlargement with the network's detail."""

    def __init__(self, features: int, scale: int) -> None:
        super().__init__(features, scale)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(cast(Tensor, self.last.bias))

    def forward(self, x: Tensor, skip: Tensor, large: Tensor) -> Tensor:  # type: ignore[override]
        return large + super().forward(x, skip)


def _conv(inputs: int, outputs: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel_size=3, padding=1)
