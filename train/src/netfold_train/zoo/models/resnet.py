"""ResNet: blocks that add to their input (He, Zhang, Ren, Sun, CVPR 2016, table 1).

With today's changes: in a bottleneck the 3x3 convolution has the stride, not the first 1x1, and a block's last batch
norm starts at 0, so that every block starts as its shortcut (Goyal et al. 2017, section 5.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

from netfold_train.models.model import Chain, Model
from netfold_train.zoo.models.linear import class_loss, named

STAGE_FEATURES = (64, 128, 256, 512)
Stem = Literal["large", "small"]


def resnet18(classes: int = 10, channels: int = 3, stem: Stem = "large") -> Model:
    """Basic blocks, 2 a stage: 11.7 million parameters at 1000 classes. Options: see `resnet`."""
    return resnet((2, 2, 2, 2), False, classes, channels, stem)


def resnet50(classes: int = 10, channels: int = 3, stem: Stem = "large") -> Model:
    """Bottleneck blocks, 3, 4, 6 and 3 a stage: 25.6 million parameters at 1000 classes. Options: see `resnet`."""
    return resnet((3, 4, 6, 3), True, classes, channels, stem)


def resnet(blocks: Sequence[int], bottleneck: bool, classes: int, channels: int, stem: Stem) -> Model:
    """Pictures [n, channels, h, w] f32 of any size -> logits [n, classes]; the target is the class, [n] int64.

    blocks: of each of the four stages. stem: "large" is the paper's for ImageNet, with a 32nd of each side at the end;
    "small" (one 3x3 convolution, no stride, no pooling: section 4.2) has an 8th, at 16 times the cost.
    """
    features = STAGE_FEATURES[0]
    large = stem == "large"
    first = _convolution(channels, features, 7, 2) if large else _convolution(channels, features, 3)
    pool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1) if large else nn.Identity()
    layers: list[tuple[str, nn.Module]] = [("stem", named(convolution=first, pool=pool))]
    for stage, (count, inner) in enumerate(zip(blocks, STAGE_FEATURES, strict=True)):
        for number in range(count):
            block = Block(features, inner, 2 if stage > 0 and number == 0 else 1, bottleneck)
            layers.append((f"stage{stage}_block{number}", block))
            features = block.outputs
    head = named(pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), logits=nn.Linear(features, classes))
    return Model(Chain([*layers, ("head", head)]), class_loss)


class Block(nn.Module):
    """relu(shortcut(x) + convolutions of x): two 3x3; in a bottleneck 1x1, 3x3, and 1x1 to four times the features.

    The shortcut is x itself, or its projection if the shape changes (the paper's option B).
    """

    def __init__(self, inputs: int, features: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        self.outputs = 4 * features if bottleneck else features
        if bottleneck:
            steps = [_convolution(inputs, features, 1), _convolution(features, features, 3, stride)]
            steps += [_convolution(features, self.outputs, 1, relu=False)]
        else:
            steps = [_convolution(inputs, features, 3, stride), _convolution(features, features, 3, relu=False)]
        nn.init.zeros_(steps[-1].get_parameter("norm.weight"))
        self.body = nn.Sequential(*steps)
        same = inputs == self.outputs and stride == 1
        self.shortcut = nn.Identity() if same else _convolution(inputs, self.outputs, 1, stride, relu=False)

    def forward(self, x: Tensor) -> Tensor:
        detail = self.body(x)
        return functional.relu(self.shortcut(x) + detail)


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, *, relu: bool = True) -> nn.Sequential:
    """A convolution without bias, a batch norm, and ReLU. Initial weights: He et al. (ICCV 2015), by fan-out."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    steps = named(conv=conv, norm=nn.BatchNorm2d(outputs))
    if relu:
        steps.add_module("relu", nn.ReLU())
    return steps
