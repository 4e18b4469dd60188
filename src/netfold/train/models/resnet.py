"""ResNet: blocks that add to their input (He, Zhang, Ren, Sun, CVPR 2016, table 1).

With today's changes: in a bottleneck the 3x3 convolution has the stride, not the first 1x1, and a block's last batch
norm starts at 0, so that every block starts as its shortcut (Goyal et al. 2017, section 5.1).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from netfold.train.model import Chain, Model

STAGE_FEATURES = (64, 128, 256, 512)


def resnet18(classes: int = 10, channels: int = 3, stem: str = "large") -> Model:
    """Basic blocks, 2 a stage: 11.7 million parameters at 1000 classes. Options: see `resnet`."""
    return resnet((2, 2, 2, 2), False, classes, channels, stem)


def resnet50(classes: int = 10, channels: int = 3, stem: str = "large") -> Model:
    """Bottleneck blocks, 3, 4, 6 and 3 a stage: 25.6 million parameters at 1000 classes. Options: see `resnet`."""
    return resnet((3, 4, 6, 3), True, classes, channels, stem)


def resnet(blocks: Sequence[int], bottleneck: bool, classes: int, channels: int, stem: str) -> Model:
    """Pictures [n, channels, h, w] f32 of any size -> logits [n, classes]; the target is the class, [n] int64.

    blocks: of each of the four stages. stem: "large" is the paper's for ImageNet, with a 32nd of each side at the end;
    "small" (one 3x3 convolution, no stride, no pooling: section 4.2) has an 8th, at 16 times the cost.
    """
    if stem not in ("large", "small"):
        raise ValueError(f'model.stem is {stem!r}; it is "large" (as for ImageNet) or "small" (for small pictures)')
    layers: list[tuple[str, nn.Module]] = [("stem", Stem(channels, stem == "large"))]
    features = STAGE_FEATURES[0]
    for stage, (count, inner) in enumerate(zip(blocks, STAGE_FEATURES, strict=True)):
        for number in range(count):
            stride = 2 if stage > 0 and number == 0 else 1
            block = Bottleneck(features, inner, stride) if bottleneck else Basic(features, inner, stride)
            layers.append((f"stage{stage}_block{number}", block))
            features = inner * (4 if bottleneck else 1)
    layers.append(("head", Head(features, classes)))
    return Model(Chain(layers), class_loss)


def class_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Cross entropy, the mean over the samples, in nats."""
    return functional.cross_entropy(logits.float(), target)


class Stem(nn.Module):
    def __init__(self, channels: int, large: bool) -> None:
        super().__init__()
        width = STAGE_FEATURES[0]
        self.conv = _conv(channels, width, 7, 2) if large else _conv(channels, width, 3)
        self.norm = nn.BatchNorm2d(width)
        self.pool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1) if large else nn.Identity()

    def forward(self, pictures: Tensor) -> Tensor:
        features: Tensor = self.pool(functional.relu(self.norm(self.conv(pictures))))
        return features


class Basic(nn.Module):
    """Two 3x3 convolutions."""

    def __init__(self, inputs: int, features: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = _conv(inputs, features, 3, stride), nn.BatchNorm2d(features)
        self.conv2, self.norm2 = _conv(features, features, 3), nn.BatchNorm2d(features)
        nn.init.zeros_(self.norm2.weight)
        self.shortcut = _shortcut(inputs, features, stride)

    def forward(self, x: Tensor) -> Tensor:
        detail = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.shortcut(x) + self.norm2(self.conv2(detail)))


class Bottleneck(nn.Module):
    """1x1 down to `features`, 3x3, 1x1 up to 4 x `features`."""

    def __init__(self, inputs: int, features: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = _conv(inputs, features, 1), nn.BatchNorm2d(features)
        self.conv2, self.norm2 = _conv(features, features, 3, stride), nn.BatchNorm2d(features)
        self.conv3, self.norm3 = _conv(features, 4 * features, 1), nn.BatchNorm2d(4 * features)
        nn.init.zeros_(self.norm3.weight)
        self.shortcut = _shortcut(inputs, 4 * features, stride)

    def forward(self, x: Tensor) -> Tensor:
        detail = functional.relu(self.norm1(self.conv1(x)))
        detail = functional.relu(self.norm2(self.conv2(detail)))
        return functional.relu(self.shortcut(x) + self.norm3(self.conv3(detail)))


class Head(nn.Module):
    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.logits = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.logits(torch.mean(x, (2, 3)))
        return logits


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    """The input itself, or its projection if the shape changes (the paper's option B)."""
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution without bias, because a batch norm follows. Initial weights: He et al. (ICCV 2015), by fan-out."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv
