"""EDSR: residual blocks without batch norm, a skip over all of them, pixel shuffle (Lim et al., CVPRW 2017).

Two skips travel through the chain beside the features: those of the head, which the body's end adds, and the input's
bicubic enlargement, to which the network adds the detail (as in VDSR, Kim et al., CVPR 2016: the untrained network *is*
bicubic, since its last convolution starts at 0).
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from netfold.train.model import Chain, Model


def baseline(scale: int = 2) -> Model:
    """The paper's small one: 16 blocks of 64 features, 1.4 million parameters at x2."""
    return edsr(features=64, blocks=16, scale=scale)


def edsr(features: int = 64, blocks: int = 16, scale: int = 2) -> Model:
    """Low resolution [n, 3, h, w] -> [n, 3, scale h, scale w], f32, 0..1 (the output may step over either end)."""
    layers: list[tuple[str, nn.Module]] = [("head", Head(features, scale))]
    layers += [(f"block{number}", Block(features)) for number in range(blocks)]
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
        # Keys's kernel with a = -1/2, which torch calls the antialiased one, and has in f32 alone.
        large = functional.interpolate(low.float(), scale_factor=self.scale, mode="bicubic", antialias=True)
        return features, features, large


class Block(nn.Module):
    """x + conv(relu(conv(x))); the second convolution starts small instead of being scaled for good."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.first = _conv(features, features)
        self.second = _conv(features, features)
        nn.init.zeros_(cast(Tensor, self.second.bias))
        with torch.no_grad():
            self.second.weight.mul_(0.1)

    def forward(self, x: Tensor, skip: Tensor, large: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x + self.second(functional.relu(self.first(x))), skip, large


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
