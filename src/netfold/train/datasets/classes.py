"""Pictures and what they show: the metric of all such data, and a folder with a folder a class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from netfold.train.datasets.pairs import read_picture
from netfold.train.examples import BadExampleError, Batch, Data, Metric

_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff")
_HELD_OUT = ("valid", "val", "test")


def class_folders(root: str, size: int = 64) -> Data:
    """root/train/<class>/... and root/valid/<class>/... (or val, or test): pictures of `size` x `size` pixels.

    Examples: [3, size, size] f32, -1..1, and the class, int64: the place of its folder among the training part's, in
    order of names. Pictures are read when they are asked for. To train on: a square of 60 to 100% of the shorter side,
    anywhere, mirrored or not; held out: of all of the shorter side, from the middle.
    The metric: accuracy; the baseline: the training part's most frequent class.
    """
    folder = Path(root)
    part = next((name for name in _HELD_OUT if (folder / name).is_dir()), None)
    if part is None:
        raise BadExampleError(
            f"{folder}: no folder {', '.join(_HELD_OUT[:-1])} or {_HELD_OUT[-1]} with held-out pictures"
        )
    train, held = _labelled(folder / "train"), _labelled(folder / part)
    classes = sorted({name for _, name in train})
    if unknown := sorted({name for _, name in held} - set(classes)):
        raise BadExampleError(f"{folder / part / unknown[0]}: a class that {folder / 'train'} does not have")
    frequent = Counter(name for _, name in train).most_common(1)[0][0]
    baseline = sum(name == frequent for _, name in held) / len(held)
    return Data(
        Pictures(train, classes, size, drawn=True),
        Pictures(held, classes, size, drawn=False),
        accuracy(baseline, "the most frequent class"),
    )


def accuracy(baseline: float, baseline_is: str) -> Metric:
    """The share of samples whose largest logit is the target's."""
    return Metric("accuracy", "", "higher", _right, baseline, baseline_is)


def nearest_mean(pictures: Tensor, classes: Tensor, held: Tensor, held_classes: Tensor) -> float:
    """The accuracy of naming the class whose mean training picture is nearest. [n, ...] f32 and [n] int64, of both."""
    means = torch.stack([pictures[classes == label].mean(0).flatten() for label in range(int(classes.max()) + 1)])
    return float((torch.cdist(held.flatten(1), means).argmin(1) == held_classes).double().mean())


class Pictures:
    """Files with their class."""

    def __init__(self, files: Sequence[tuple[Path, str]], classes: Sequence[str], size: int, drawn: bool) -> None:
        """drawn: the square is drawn from the example's seed; else it is the middle one."""
        self.files, self.classes, self.size, self.drawn = files, classes, size, drawn

    def __len__(self) -> int:
        return len(self.files)

    def batch(self, indices: Sequence[int], seeds: Sequence[int]) -> Batch:
        pictures = [self._one(self.files[index][0], seed) for index, seed in zip(indices, seeds, strict=True)]
        target = torch.tensor([self.classes.index(self.files[index][1]) for index in indices])
        return Batch((torch.stack(pictures),), target)

    def _one(self, path: Path, seed: int) -> Tensor:
        picture = read_picture(path)
        height, width = picture.shape[1:]
        side = min(height, width)
        top, left = (height - side) // 2, (width - side) // 2
        mirrored = False
        if self.drawn:
            draw = np.random.default_rng(seed)
            side = max(1, round(side * draw.uniform(0.6, 1.0)))
            top, left = int(draw.integers(height - side + 1)), int(draw.integers(width - side + 1))
            mirrored = bool(draw.integers(2))
        square = picture[:, top : top + side, left : left + side]
        resized = functional.interpolate(square[None], size=(self.size, self.size), mode="bilinear", antialias=True)[0]
        return (resized.flip(2) if mirrored else resized) * 2.0 - 1.0


def _right(logits: Tensor, target: Tensor) -> Tensor:
    return logits.argmax(1) == target


def _labelled(folder: Path) -> list[tuple[Path, str]]:
    files = [(path, path.parent.name) for path in sorted(folder.glob("*/*")) if path.suffix.lower() in _SUFFIXES]
    if not files:
        raise BadExampleError(f"{folder}: no pictures; they lie in {folder / '<class>'}/, a folder a class")
    return files
