"""Pictures with objects to find: generated shapes, and scikit-image's coins.

An example: a picture [3, h, w] f32, 0..1, and its objects, padded to a fixed number: boxes [m, 4] f32 (left, top,
right, bottom, in pixels), classes int64 [m] from 1, 0 for padding, and masks u8 [m, h, w]. The target is classes and
masks once more, packed as u8 [m, 1 + h w], because a metric sees the target only.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import skimage
import torch
from numpy.typing import NDArray
from pydantic import PositiveInt
from torch import Tensor

from netfold_train.data.examples import Data, Examples, Metric, OneByOne

SHAPES = ("disc", "box", "triangle")
"""Classes 1, 2 and 3."""
SCORE_AT_LEAST = 0.5
"""Of detections that the metric counts."""
# skimage has types for some functions only.
_data_sets: Any = skimage.data
_filters: Any = skimage.filters
_measure: Any = skimage.measure
_morphology: Any = skimage.morphology
_SMALLEST_PIXELS = 16
"""Of an object that is cut off by its picture's edge or by another object."""
Masks = NDArray[np.bool_]


def shapes(
    size: PositiveInt = 64, objects: PositiveInt = 4, count: PositiveInt = 2000, held_out: PositiveInt = 200
) -> Data:
    """1 to `objects` discs, boxes and triangles of random place, size and colour, with noise; later ones cover others.

    A training example is a function of its seed; an epoch has `count`. Metric: `overlap`. Baseline: each connected
    region that differs from the most frequent grey, with the true class most frequent in the held-out pictures.
    """

    def example(_number: int, seed: int) -> tuple[Tensor, ...]:
        return drawn(np.random.default_rng([seed, 1]), size, objects)

    def held(number: int, _seed: int) -> tuple[Tensor, ...]:
        return drawn(np.random.default_rng([number, 2]), size, objects)

    return _data(OneByOne(count, example), OneByOne(held_out, held))


def coins(size: PositiveInt = 128, objects: PositiveInt = 12, count: PositiveInt = 200) -> Data:
    """Squares of scikit-image's picture of 24 coins; an epoch has `count` random ones, perhaps mirrored.

    Truth: regions of a threshold (Otsu) after the background, a wide median, is taken off. The left two thirds are for
    training, and squares of the right third are held out. Metric and baseline: as `shapes`.
    """
    grey, found = _coins()
    border = grey.shape[1] * 2 // 3
    if size > min(grey.shape[0], border, grey.shape[1] - border):
        raise ValueError(f"data.size is {size}; the held-out part of the coins has {grey.shape[1] - border} columns")

    def cut(top: int, left: int, mirrored: bool) -> tuple[Tensor, ...]:
        place = slice(top, top + size), slice(left, left + size)
        picture, numbers = grey[place], found[place]
        if mirrored:
            picture, numbers = picture[:, ::-1], numbers[:, ::-1]
        masks = [numbers == number for number in np.unique(numbers) if number]
        whole = [mask for mask in masks if mask.sum() >= _SMALLEST_PIXELS][:objects]
        return packed(np.repeat(picture[None], 3, 0), whole, [1] * len(whole), objects)

    def example(_number: int, seed: int) -> tuple[Tensor, ...]:
        draw = np.random.default_rng(seed)
        top, left = int(draw.integers(grey.shape[0] - size + 1)), int(draw.integers(border - size + 1))
        return cut(top, left, bool(draw.integers(2)))

    tops = range(0, grey.shape[0] - size + 1, max(1, size // 2))
    return _data(OneByOne(count, example), OneByOne(len(tops), lambda number, _seed: cut(tops[number], border, False)))


def drawn(draw: np.random.Generator, size: int, objects: int) -> tuple[Tensor, ...]:
    """One picture of shapes, as the module's docstring says."""
    rows, columns = np.mgrid[:size, :size]
    picture = np.full((3, size, size), draw.uniform(0.3, 0.7))
    masks: list[Masks] = []
    classes: list[int] = []
    for _ in range(int(draw.integers(1, objects + 1))):
        kind, radius = int(draw.integers(len(SHAPES))), draw.uniform(size / 10, size / 5)
        down, across = (axis - draw.uniform(radius, size - radius) for axis in (rows, columns))
        inside = (
            down**2 + across**2 <= radius**2,
            np.maximum(abs(down), abs(across)) <= radius * 0.8,
            (abs(across) <= (down + radius) / 2) & (down <= radius * 0.8),
        )[kind]
        picture[:, inside] = (draw.uniform(0, 0.2, 3) + 0.8 * draw.integers(2))[:, None]
        masks = [mask & ~inside for mask in masks] + [inside]
        classes.append(kind + 1)
    picture += draw.normal(0, 0.05, picture.shape)
    seen = [number for number, mask in enumerate(masks) if mask.sum() >= _SMALLEST_PIXELS]
    return packed(picture.clip(0, 1), [masks[each] for each in seen], [classes[each] for each in seen], objects)


def packed(
    picture: NDArray[np.float64], masks: Sequence[Masks], classes: Sequence[int], objects: int
) -> tuple[Tensor, ...]:
    """(picture, boxes, classes, masks, target) of at most `objects` objects, padded."""
    height, width = picture.shape[1:]
    boxes, labels = torch.zeros(objects, 4), torch.zeros(objects, dtype=torch.long)
    filled = torch.zeros(objects, height, width, dtype=torch.uint8)
    for number, (mask, label) in enumerate(zip(masks, classes, strict=True)):
        down, across = np.nonzero(mask)
        boxes[number] = torch.tensor([across.min(), down.min(), across.max() + 1, down.max() + 1])
        labels[number], filled[number] = label, torch.from_numpy(mask.astype(np.uint8))
    target = torch.cat([labels.byte()[:, None], filled.flatten(1)], 1)
    return torch.from_numpy(picture.astype(np.float32)), boxes, labels, filled, target


def overlap(output: Tensor, target: Tensor) -> Tensor:
    """[n, m]: of each true object the intersection over union with its detection, 0 without one and for padding.

    output: [n, d, 2 + h w], of each detection its class (0: padding), its score and its mask, 0..1. Detections with a
    score of 0.5 or more choose, the highest score first, the object of their class with the largest overlap that has no
    detection yet (as COCO does). Detections beyond the objects do not lower the metric.
    """
    found = torch.zeros(target.shape[:2], device=target.device)
    for number, (detections, objects) in enumerate(zip(output, target, strict=True)):
        kept = detections[(detections[:, 0] > 0) & (detections[:, 1] >= SCORE_AT_LEAST)]
        kept = kept[kept[:, 1].argsort(descending=True, stable=True)]
        mine, true = (kept[:, 2:] >= 0.5).float(), objects[:, 1:].float()
        both = mine @ true.T
        ratio = both / (mine.sum(1)[:, None] + true.sum(1) - both).clamp_min(1)
        ratio[kept[:, :1] != objects[:, 0]] = 0
        for row in ratio:
            row[found[number] > 0] = 0
            if row.max() > 0:
                found[number, row.argmax()] = row.max()
    return found


def real_objects(target: Tensor) -> Tensor:
    """The number of objects that are not padding."""
    return (target[..., 0] > 0).sum()


def _data(train: Examples, held: Examples) -> Data:
    batch = held.batch(range(len(held)), range(len(held)))
    images, _, labels, _ = batch.inputs
    frequent = int(labels[labels > 0].mode().values)
    regions = torch.stack([_regions(image, frequent, labels.shape[1] * 2) for image in images])
    baseline = float(overlap(regions, batch.target).sum() / real_objects(batch.target))
    said = "connected regions, all of the most frequent class"
    return Data(train, held, Metric("overlap", "", "higher", overlap, baseline, said, real_objects))


def _regions(image: Tensor, label: int, count: int) -> Tensor:
    """The largest connected regions of an image that differ from its median grey, as detections."""
    grey = image.numpy().mean(0)
    away = abs(grey - np.median(grey))
    numbers = _measure.label(away > _filters.threshold_otsu(away), connectivity=1)
    sizes = np.bincount(numbers.flatten())[1:]
    output = torch.zeros(count, 2 + grey.size)
    for place, number in enumerate((np.argsort(-sizes, kind="stable") + 1)[:count]):
        output[place, :2] = torch.tensor([label, 1.0])
        output[place, 2:] = torch.from_numpy((numbers == number).flatten())
    return output


@functools.cache
def _coins() -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """The picture, 0..1, and for each pixel the number of its coin, 0 for none."""
    grey = _data_sets.coins() / 255.0
    rough = _filters.median(grey[::4, ::4], np.ones((25, 25)))
    lit = grey - rough.repeat(4, 0).repeat(4, 1)[: grey.shape[0], : grey.shape[1]]
    closed = _morphology.isotropic_closing(lit > _filters.threshold_otsu(lit), 2)
    # Holes of coins: small regions of the background.
    around = _measure.label(~closed, connectivity=1)
    holes = ~closed & (np.bincount(around.flatten())[around] < 500)
    return grey, _measure.label(_morphology.isotropic_opening(closed | holes, 4), connectivity=1)
