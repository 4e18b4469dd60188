"""EDSR: residual blocks without batch norm, a skip over all of them, pixel shuffle (Lim et al., CVPRW 2017).

Two skips travel through the chain beside the features: those of the head, which the body's end adds, and the input's
bicubic enlargement, to which the network adds the detail (as in VDSR, Kim et al., CVPR 2016: the untrained network *is*
bicubic, since its last convolution starts at 0). So no step is spent on learning to enlarge, and a network that has
learnt nothing scores as bicubic, not below: what is above is learnt.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from netfold.train.model import Chain, Model
from netfold.train.resolution import bicubic


def baseline(scale: int = 2) -> Model:
    """The paper's small one: 16 blocks of 64 features, 1.4 million parameters at x2."""
    return edsr(features=64, blocks=16, scale=scale)


def large(scale: int = 2) -> Model:
    """The paper's best one: 32 blocks of 256 features, residuals scaled by 0.1, 40.7 million parameters at x2."""
    return edsr(features=256, blocks=32, scale=scale, residual_scale=0.1)


def edsr(features: int = 64, blocks: int = 16, scale: int = 2, residual_scale: float = 1.0) -> Model:
    """Low resolution [n, 3, h, w] -> [n, 3, scale h, scale w], f32, 0..1 (the output may step over either end).

    scale: 2, 3 or 4; the data's must be the same. residual_scale: what a block adds is multiplied by it, which keeps
    many features from growing without end (section 3.3).
    """
    if scale not in (2, 3, 4):
        raise ValueError(f"model.scale is {scale}; EDSR enlarges by 2, 3 or 4")
    layers: list[tuple[str, nn.Module]] = [("head", Head(features, scale))]
    layers += [(f"block{number}", Block(features, residual_scale)) for number in range(blocks)]
    layers += [("tail", Tail(features, scale))]
    return Model(Chain(layers), functional.l1_loss)


class Head(nn.Module):
    """low -> (features, the same features for the tail's skip, the bicubic enlargement)."""

    def __init__(self, features: int, scale: int) -> None:
        super().__init__()
        self.scale = scale
        self.conv = _conv(3, features)

    def forward(self, low: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = self.conv(low)
        # In f32, whatever the rest is computed in: torch has this kernel in no other, and the output then has the steps
        # of f32 too.
        return features, features, bicubic(low.float(), self.scale)


class Block(nn.Module):
    """x + residual_scale conv(relu(conv(x))). Without a scale the second convolution starts small instead.

    To start small is enough for few features, and keeps the first steps from blowing up the rounding differences
    between two runs.
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
    """The body's last convolution and both skips' ends."""

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
