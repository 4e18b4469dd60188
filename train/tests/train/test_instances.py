"""Pictures of objects, the overlap of masks, and the wrapper of a detector with torchvision's interface."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from made import data, equal
from torch import Tensor, nn

from netfold_train.models import make_model
from netfold_train.recipe import Factory
from netfold_train.zoo.data.instances import overlap, packed, real_objects
from netfold_train.zoo.models.mask_rcnn import Padded, loss


@pytest.mark.parametrize("name, options", [("shapes", {"size": 48, "held_out": 20}), ("coins", {"size": 96})])
def test_objects_have_their_boxes_and_masks_and_come_from_the_seed(name: str, options: dict[str, Any]) -> None:
    found = data(name, **options)
    batch = found.train.batch([0, 1], [5, 6])
    assert equal(batch.parts(2)[1], found.train.batch([1], [6])) and not equal(batch, found.train.batch([0, 1], [7, 8]))
    images, boxes, labels, masks = batch.inputs
    assert 0 <= images.min() < images.max() <= 1
    assert torch.equal(batch.target[..., 0], labels) and torch.equal(batch.target[..., 1:], masks.flatten(2))
    assert (masks.sum(1) <= 1).all(), "no pixel has two objects"
    for box, label, mask in zip(boxes.flatten(0, 1), labels.flatten(), masks.flatten(0, 1), strict=True):
        left, top, right, bottom = box.int().tolist()
        assert (label > 0) == (mask.sum() >= 16) == (left < right)
        assert mask[top:bottom, left:right].sum() == mask.sum()
        if label:
            sides = mask[top, :], mask[bottom - 1, :], mask[:, left], mask[:, right - 1]
            assert all(side.any() for side in sides), "the box is tight"
    assert 0.1 < found.metric.baseline < 0.9


def test_the_coins_are_24_and_held_out_squares_are_right_of_the_training_squares() -> None:
    from netfold_train.zoo.data.instances import _coins

    grey, numbers = _coins()
    assert numbers.max() == 24 and np.bincount(numbers.flatten())[1:].min() > 1000
    examples = data("coins", size=96).train
    with pytest.raises(ValueError, match="the held-out part of the coins has 128 columns"):
        data("coins", size=129)
    assert grey.shape == (303, 384) and len(examples) == 200


def square(left: int, width: int, size: int = 8) -> np.ndarray:
    mask = np.zeros((size, size), dtype=bool)
    mask[:4, left : left + width] = True
    return mask


def detections(*found: tuple[int, float, np.ndarray]) -> Tensor:
    rows = [
        torch.cat([torch.tensor([float(label), score]), torch.from_numpy(mask).flatten()])
        for label, score, mask in found
    ]
    return torch.stack([*rows, torch.zeros(66)])[None]


def test_each_object_has_at_most_one_detection_of_its_class() -> None:
    target = packed(np.zeros((3, 8, 8)), [square(0, 4), square(4, 4)], [1, 2], 3)[-1][None]
    assert real_objects(target) == 2

    def found(*given: tuple[int, float, np.ndarray]) -> list[float]:
        return overlap(detections(*given), target)[0].tolist()

    assert found((1, 0.9, square(0, 4)), (2, 0.8, square(4, 4))) == [1, 1, 0]
    assert found((1, 0.9, square(0, 2))) == [0.5, 0, 0]
    assert found((2, 0.9, square(0, 4)), (1, 0.4, square(0, 4))) == [0, 0, 0], "another class, and a low score"
    # The higher score chooses first, though the other one fits better.
    assert found((1, 0.7, square(0, 4)), (1, 0.9, square(0, 3))) == [0.75, 0, 0]
    torch.testing.assert_close(loss(detections((1, 0.9, square(0, 4))), target), torch.tensor([0.5]))


class Detector(nn.Module):
    """torchvision's interface: in training a dict of losses, otherwise a list of dicts of detections."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.seen: list[dict[str, Tensor]] = []

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        if self.training:
            assert targets is not None and len(images) == len(targets)
            self.seen += targets
            mean = torch.stack([image.mean() for image in images]).mean()
            return {
                "loss_box": self.weight * mean,
                "loss_mask": self.weight * sum(len(each["labels"]) for each in targets),
            }
        found = []
        for number in range(len(images)):
            height, width = images[number].shape[1:]
            masks = torch.arange(number + 2.0).view(-1, 1, 1, 1).expand(-1, 1, height, width)
            scores = torch.linspace(0.1, 0.9, number + 2)
            found.append(
                {
                    "boxes": torch.zeros(number + 2, 4),
                    "labels": torch.arange(number + 2) + 1,
                    "scores": scores,
                    "masks": masks,
                }
            )
        return found


def test_padding_is_taken_off_and_each_image_has_its_own_loss() -> None:
    batch = data("shapes", size=48, held_out=4).train.batch([0, 1, 2], [4, 5, 6])
    images, boxes, labels, masks = batch.inputs
    module = Padded(Detector(), 3)
    losses = module(*batch.inputs)
    counts = (labels > 0).sum(1)
    torch.testing.assert_close(losses, 2 * (images.mean((1, 2, 3)) + counts))
    assert torch.equal(loss(losses, batch.target), losses)
    for number, seen in enumerate(module.detector.seen):
        count = int(counts[number])
        assert torch.equal(seen["boxes"], boxes[number, :count]) and torch.equal(seen["masks"], masks[number, :count])
        assert torch.equal(seen["labels"], labels[number, :count])
    losses.mean().backward()
    assert module.detector.weight.grad is not None


def test_detections_are_padded_and_the_best_are_kept() -> None:
    module = Padded(Detector(), 3).eval()
    nothing = torch.zeros(3, 1, 4), torch.zeros(3, 1, dtype=torch.long), torch.zeros(3, 1, 4, 5, dtype=torch.uint8)
    output = module(torch.zeros(3, 3, 4, 5), *nothing)
    assert output.shape == (3, 3, 2 + 20)
    assert output[0, :, 0].tolist() == [2, 1, 0] and output[2, :, 0].tolist() == [4, 3, 2]
    assert output[0, 0, 1] == pytest.approx(0.9) and (output[0, 0, 2:] == 1).all() and not output[0, 2].any()


def test_torchvisions_network_trains_and_detects() -> None:
    pytest.importorskip("torchvision")
    torch.manual_seed(0)
    options = {"size": 48, "detections": 5, "options": {"rpn_post_nms_top_n_train": 50, "box_batch_size_per_image": 32}}
    model = make_model(Factory.model_validate({"name": "mask-rcnn", **options}))
    batch = data("shapes", size=48, held_out=2).train.batch([0, 1], [4, 5])
    losses = model.losses(model.module(*batch.inputs), batch.target)
    losses.mean().backward()
    assert losses.shape == (2,) and losses.isfinite().all()
    assert all(each.grad is not None for each in model.module.parameters() if each.requires_grad)
    output = model.module.eval()(*batch.inputs)
    assert output.shape == (2, 5, 2 + 48 * 48) and model.losses(output, batch.target).shape == (2,)


def test_a_missing_torchvision_is_an_error_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netfold_train.zoo.models.mask_rcnn.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs torchvision, not installed here: pip install torchvision"):
        make_model(Factory(name="mask-rcnn"))
