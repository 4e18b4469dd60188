"""Mask R-CNN (He et al. 2017) of torchvision, which takes lists of images and objects, for padded tensors."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from netfold.extras import MissingExtraError, command
from netfold_train.models.model import Model, at_least_f32
from netfold_train.zoo.data.instances import overlap


def mask_rcnn(
    classes: PositiveInt = 3,
    size: PositiveInt = 64,
    detections: PositiveInt = 20,
    options: dict[str, Any] | None = None,
) -> Model:
    """ResNet-50 with a feature pyramid, without pretrained weights.

    Inputs: images [n, 3, h, w] f32, boxes [n, m, 4], classes [n, m], masks [n, m, h, w], as `data.instances` makes
    them. In training the output is the loss of each image [n], the sum of torchvision's losses. In evaluation it is
    detections [n, `detections`, 2 + h w]: class (0: none), score, mask; then the loss of an image is 1 less its mean
    `overlap`.
    classes: without the background. size: of the shorter side inside the network. options: other keyword arguments of
    torchvision's maskrcnn_resnet50_fpn, such as `{trainable_backbone_layers = 3}`.
    """
    if find_spec("torchvision") is None:
        raise MissingExtraError(f"model mask-rcnn needs torchvision, not installed here: {command('torchvision')}")
    from torchvision.models.detection import maskrcnn_resnet50_fpn

    detector = maskrcnn_resnet50_fpn(
        weights=None,
        weights_backbone=None,
        num_classes=1 + classes,
        min_size=size,
        box_detections_per_img=detections,
        **(options or {}),
    )
    return Model(Padded(detector, detections), loss)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """[n]; in training the output is the losses, and in evaluation detections."""
    if output.ndim == 1:
        return output
    objects = (target[..., 0] > 0).sum(1)
    return 1 - overlap(output, target).sum(1) / objects.clamp_min(1)


class Padded(nn.Module):
    """A detector with torchvision's interface, for tensors of fixed shape.

    In training it computes one image at a time: torchvision divides its losses by the number of regions in all images
    that it is given, so the loss of an image would depend on the images beside it.
    """

    def __init__(self, detector: nn.Module, detections: int) -> None:
        super().__init__()
        self.detector, self.detections = detector, detections

    def forward(self, images: Tensor, boxes: Tensor, labels: Tensor, masks: Tensor) -> Tensor:
        if not self.training:
            found = self.detector(list(images))
            return torch.stack([self._padded(each, image) for each, image in zip(found, images, strict=True)])
        losses = []
        for image, *objects in zip(images, boxes, labels, masks, strict=True):
            parts = self.detector([image], [unpadded(*objects)])
            losses.append(torch.stack([at_least_f32(part) for part in parts.values()]).sum())
        return torch.stack(losses)

    def _padded(self, found: dict[str, Tensor], image: Tensor) -> Tensor:
        output = image.new_zeros(self.detections, 2 + image[0].numel(), dtype=torch.float32)
        best = found["scores"].argsort(descending=True, stable=True)[: self.detections]
        output[: len(best), 0] = found["labels"][best].float()
        output[: len(best), 1] = found["scores"][best].float()
        output[: len(best), 2:] = found["masks"][best].float().flatten(1)
        return output


def unpadded(boxes: Tensor, labels: Tensor, masks: Tensor) -> dict[str, Tensor]:
    """The objects of one image, in torchvision's form."""
    real = labels > 0
    return {"boxes": boxes[real], "labels": labels[real], "masks": masks[real]}
