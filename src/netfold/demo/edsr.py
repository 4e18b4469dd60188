"""EDSR for x2: residual blocks without batch norm, a global skip, pixel shuffle (Lim et al., CVPRW 2017, 3).

Where we depart from the paper: the network adds to the bicubic enlargement of its input, and its last
convolution starts at 0, so that the untrained network *is* bicubic, to the bit. A minute of training is then
spent on the detail that bicubic misses rather than on learning to enlarge (as in VDSR, Kim et al., CVPR 2016).
So a network that has learnt nothing would score as bicubic, not below; what is above is learnt.
The paper's own global skip, from the head's features to the body's, is kept.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from netfold.demo.resolution import bicubic
from netfold.demo.settings import SCALE

RESIDUAL_START = 0.1


class ResidualBlock(nn.Module):
    """x + conv(relu(conv(x))), where the second convolution starts small.

    The paper scales the residual by 0.1 for good, to keep large networks from diverging; to start there is
    enough here, and keeps the first steps from blowing up the rounding differences between two runs.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        last = _conv(features, features)
        nn.init.zeros_(cast(Tensor, last.bias))
        with torch.no_grad():
            last.weight.mul_(RESIDUAL_START)
        self.body = nn.Sequential(_conv(features, features), nn.ReLU(inplace=True), last)

    def forward(self, x: Tensor) -> Tensor:
        return x + cast(Tensor, self.body(x))


class Edsr(nn.Module):
    """Low resolution [n, 3, h, w] -> [n, 3, 2h, 2w], f32, 0..1 (the output may step over either end)."""

    def __init__(self, features: int, blocks: int) -> None:
        super().__init__()
        self.head = _conv(3, features)
        self.body = nn.Sequential(*(ResidualBlock(features) for _ in range(blocks)), _conv(features, features))
        self.upsample = nn.Sequential(_conv(features, features * SCALE**2), nn.PixelShuffle(SCALE))
        self.tail = _conv(features, 3)
        nn.init.zeros_(self.tail.weight)
        nn.init.zeros_(cast(Tensor, self.tail.bias))

    def forward(self, low: Tensor) -> Tensor:
        features = self.head(low)
        features = features + self.body(features)
        return bicubic(low) + cast(Tensor, self.tail(self.upsample(features)))


def _conv(inputs: int, outputs: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel_size=3, padding=1)
