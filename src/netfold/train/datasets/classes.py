"""Pictures and their classes: accuracy, folders with one folder per class, and Fashion-MNIST."""

from __future__ import annotations

import gzip
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from netfold.train.datasets.pairs import SUFFIXES, read_picture
from netfold.train.examples import BadExampleError, Batch, Data, InMemory, Metric

_HELD_OUT = ("valid", "val", "test")
_DTYPE_U8 = 0x08


def class_folders(root: str, size: int = 64) -> Data:
    """root/train/<class>/... and root/valid/<class>/... (or val, or test): pictures of `size` x `size` pixels.

    Examples: [3, size, size] f32, -1..1, and the class, int64: the index of its folder among the training part's, by
    name. Each batch reads its files. A training example is a random square of 60 to 100% of the shorter side, perhaps
    mirrored. A held-out example is the middle square of the whole shorter side.
    Metric: accuracy. Baseline: the training part's most frequent class.
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
    """The accuracy of choosing the class with the nearest mean training picture. Pictures [n, ...] f32, classes [n]."""
    means = torch.stack([pictures[classes == label].mean(0).flatten() for label in range(int(classes.max()) + 1)])
    return float((torch.cdist(held.flatten(1), means).argmin(1) == held_classes).double().mean())


class Pictures:
    """Examples of files with their classes."""

    def __init__(self, files: Sequence[tuple[Path, str]], classes: Sequence[str], size: int, drawn: bool) -> None:
        """drawn: choose the square by the example's seed; otherwise the middle square."""
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
    files = [(path, path.parent.name) for path in sorted(folder.glob("*/*")) if path.suffix.lower() in SUFFIXES]
    if not files:
        raise BadExampleError(f"{folder}: no pictures; they must be in {folder / '<class>'}/, one folder per class")
    return files


def fashion_mnist(root: str = "/usr/share/datasets/fashion-mnist", held_out: int | None = None) -> Data:
    """Fashion-MNIST: 70 000 grey pictures of ten kinds of clothes (Xiao, Rasul, Vollgraf 2017), as Debian packs it.

    Examples: [1, 28, 28] f32, with mean 0 and deviation 1 over the training part; the class, 0..9. About 220 MB.
    Held out are the 10 000 test pictures, or the first `held_out` of them. Reads the four gzipped IDX files in `root`.
    Metric: accuracy. Baseline: the class with the nearest mean picture.
    """
    if held_out is not None and held_out < 1:
        raise ValueError(f"data.held_out is {held_out}; at least one picture must be held out")
    folder = Path(root)
    if not folder.is_dir():
        raise BadExampleError(
            f"{folder}: there is no such folder; install Debian's dataset-fashion-mnist, or name in data.root the "
            "folder with Fashion-MNIST's four .gz files"
        )
    pictures, classes = _part(folder, "train")
    held, held_classes = (tensor[:held_out] for tensor in _part(folder, "t10k"))
    mean, deviation = pictures.mean(), pictures.std()
    pictures, held = (pictures - mean) / deviation, (held - mean) / deviation
    baseline = nearest_mean(pictures, classes, held, held_classes)
    return Data(
        InMemory(pictures, target=classes),
        InMemory(held, target=held_classes),
        accuracy(baseline, "the nearest class mean"),
    )


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read a gzipped IDX file of bytes: 0, 0, type, number of dimensions, their sizes (big-endian u32), the bytes."""
    try:
        raw = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise BadExampleError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if len(raw) < 4 or raw[:3] != bytes((0, 0, _DTYPE_U8)):
        raise BadExampleError(f"{path}: it begins with {raw[:4].hex()}; an IDX file of bytes begins with 000008")
    begin = 4 + 4 * raw[3]
    shape = [int.from_bytes(raw[at : at + 4], "big") for at in range(4, begin, 4)]
    if len(raw) != begin + int(np.prod(shape)):
        raise BadExampleError(f"{path}: {len(raw) - begin} bytes after a header with the shape {shape}")
    return np.frombuffer(raw, np.uint8, offset=begin).reshape(shape)


def _part(folder: Path, name: str) -> tuple[Tensor, Tensor]:
    pictures, classes = (read_idx(folder / f"{name}-{kind}-ubyte.gz") for kind in ("images-idx3", "labels-idx1"))
    if pictures.ndim != 3 or classes.shape != pictures.shape[:1] or not len(classes):
        raise BadExampleError(f"{folder}: {name} has pictures {pictures.shape} and classes {classes.shape}")
    scaled = torch.from_numpy(pictures.astype(np.float32)).div(255.0).unsqueeze(1)
    return scaled, torch.from_numpy(classes.astype(np.int64))
