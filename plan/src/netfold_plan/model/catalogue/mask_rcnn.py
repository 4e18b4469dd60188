"""Mask R-CNN (He et al. 2017) with ResNet-50 and a feature pyramid, as torchvision defines it for COCO's 91 classes.

Batch norm, the first convolution and the first stage are frozen: they are part of the model and have no gradients.
Its work is counted at 800 x 1344 pixels with 512 regions an image, a quarter of which get a mask.
"""

from netfold_plan.model.catalogue.layers import Layer, Stack
from netfold_plan.model.catalogue.plain import bottleneck

_CLASSES = 91
_PYRAMID = 256
_REGIONS = 512
_MASKS = 128
_ANCHORS = 3


def mask_rcnn() -> list[Layer]:
    image = Stack(3, 800, 1344)
    image.frozen = True
    image.conv(64, 7, 2, 3, bias=False).pool(3, 2, 1)
    ends = []
    for stage, blocks in enumerate((3, 4, 6, 3)):
        image.frozen = stage == 0
        for block in range(blocks):
            bottleneck(image, 64 << stage, stride=2 if stage > 0 and block == 0 else 1, norm=False)
        ends.append(image.fork())
    for end in ends:
        end.frozen = False
        end.conv(_PYRAMID, 1)
    for end in ends:
        end.conv(_PYRAMID, 3, 1, 1)
    levels = [*ends, ends[-1].fork().pool(1, 2)]
    layers = image.layers
    layers += _shared([_proposals(level) for level in levels])
    boxes = Stack(_PYRAMID, 7, 7, layers=layers, rows=_REGIONS).linear(1024).linear(1024)
    boxes.fork().linear(_CLASSES)
    boxes.linear(4 * _CLASSES)
    masks = Stack(_PYRAMID, 14, 14, layers=layers, rows=_MASKS)
    for _ in range(4):
        masks.conv(_PYRAMID, 3, 1, 1)
    masks.upconv(_PYRAMID, 2).conv(_CLASSES, 1)
    return layers


def _proposals(level: Stack) -> list[Layer]:
    head = Stack(level.channels, *level.size).conv(_PYRAMID, 3, 1, 1)
    head.fork().conv(_ANCHORS, 1)
    return head.conv(4 * _ANCHORS, 1).layers


def _shared(runs: list[list[Layer]]) -> list[Layer]:
    """The same layers on several inputs: their parameters count once, their arithmetic is added up."""
    return [
        Layer(f"proposals.{same[0].name}", same[0].shapes, sum(layer.flops for layer in same))
        for same in zip(*runs, strict=True)
    ]
