"""Pictures and their classes: folders with one folder per class, and Fashion-MNIST."""

from __future__ import annotations

import gzip
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import PositiveInt
from torch import Tensor
from torch.nn import functional

from netfold_train.data.examples import BadExampleError, Data, Examples, InMemory, Metric, OneByOne
from netfold_train.zoo.data.super_resolution import SUFFIXES, read_picture

FASHION_MNIST = "/usr/share/datasets/fashion-mnist"
"""The folder in which Debian's dataset-fashion-mnist puts its files."""


def class_folders(root: str, size: int = 64) -> Data:
    """root/train/<class>/... and root/valid/<class>/... (or val, or test): pictures of `size` x `size` pixels.

    Examples: [3, size, size] f32, -1..1, and the class, int64: the index of its folder among the training part's, by
    name. Each batch reads its files. A training example is a random square of 60 to 100% of the shorter side, perhaps
    mirrored. A held-out example is the middle square of the whole shorter side.
    Metric: accuracy. Baseline: the training part's most frequent class.
    """
    folder = Path(root)
    part = next((name for name in ("valid", "val", "test") if (folder / name).is_dir()), None)
    if part is None:
        raise BadExampleError(f"{folder}: no folder valid, val or test with held-out pictures")
    train, held = _files(folder / "train"), _files(folder / part)
    classes = sorted({path.parent.name for path in train})
    if unknown := sorted({path.parent.name for path in held} - set(classes)):
        raise BadExampleError(f"{folder / part / unknown[0]}: a class that {folder / 'train'} does not have")
    frequent = Counter(path.parent.name for path in train).most_common(1)[0][0]
    baseline = sum(path.parent.name == frequent for path in held) / len(held)
    return Data(
        picture_files(train, classes, size, drawn=True),
        picture_files(held, classes, size, drawn=False),
        _accuracy(baseline, "the most frequent class"),
    )


def picture_files(files: Sequence[Path], classes: Sequence[str], size: int, *, drawn: bool) -> Examples:
    """Examples of files, whose folders are their classes.

    drawn: choose the square by the example's seed; otherwise the middle square.
    """

    def example(number: int, seed: int) -> tuple[Tensor, Tensor]:
        picture = read_picture(files[number])
        height, width = picture.shape[1:]
        side = min(height, width)
        top, left, mirrored = (height - side) // 2, (width - side) // 2, False
        if drawn:
            draw = np.random.default_rng(seed)
            side = max(1, round(side * draw.uniform(0.6, 1.0)))
            top, left = int(draw.integers(height - side + 1)), int(draw.integers(width - side + 1))
            mirrored = bool(draw.integers(2))
        square = picture[:, top : top + side, left : left + side]
        resized = functional.interpolate(square[None], size=(size, size), mode="bilinear", antialias=True)[0]
        scaled = (resized.flip(2) if mirrored else resized) * 2.0 - 1.0
        return scaled, torch.tensor(classes.index(files[number].parent.name))

    return OneByOne(len(files), example)


def fashion_mnist(root: str = FASHION_MNIST, held_out: PositiveInt | None = None) -> Data:
    """Fashion-MNIST: 70 000 grey pictures of ten kinds of clothes (Xiao, Rasul, Vollgraf 2017), as Debian packs it.

    Examples: [1, 28, 28] f32, with mean 0 and deviation 1 over the training part; the class, 0..9. About 220 MB.
    Held out are the 10 000 test pictures, or the first `held_out` of them. Reads the four gzipped IDX files in `root`.
    Metric: accuracy. Baseline: the class with the nearest mean picture.
    """
    folder = Path(root)
    pictures, classes = fashion_part(folder, "train")
    held, held_classes = (tensor[:held_out] for tensor in fashion_part(folder, "t10k"))
    mean, deviation = pictures.mean(), pictures.std()
    pictures, held = (pictures - mean) / deviation, (held - mean) / deviation
    means = torch.stack([pictures[classes == label].mean(0).flatten() for label in range(int(classes.max()) + 1)])
    right = torch.cdist(held.flatten(1), means).argmin(1) == held_classes
    return Data(
        InMemory(pictures, target=classes),
        InMemory(held, target=held_classes),
        _accuracy(float(right.double().mean()), "the nearest class mean"),
    )


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read a gzipped IDX file of bytes: 0, 0, type, number of dimensions, their sizes (big-endian u32), the bytes."""
    try:
        raw = gzip.decompress(path.read_bytes())
        if len(raw) < 4 or raw[:3] != bytes((0, 0, 8)):
            raise ValueError(f"it begins with {raw[:4].hex()}; an IDX file of bytes begins with 000008")
        shape = np.frombuffer(raw, ">u4", raw[3], offset=4)
        return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise BadExampleError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def _accuracy(baseline: float, baseline_is: str) -> Metric:
    """The share of samples whose largest logit is the target's."""
    return Metric("accuracy", "", "higher", lambda logits, target: logits.argmax(1) == target, baseline, baseline_is)


def _files(folder: Path) -> list[Path]:
    files = [path for path in sorted(folder.glob("*/*")) if path.suffix.lower() in SUFFIXES]
    if not files:
        raise BadExampleError(f"{folder}: no pictures; they must be in {folder / '<class>'}/, one folder per class")
    return files


def fashion_part(folder: Path, name: str) -> tuple[Tensor, Tensor]:
    """The pictures [n, 1, 28, 28] f32, 0..1, and classes int64 [n] of Fashion-MNIST's part "train" or "t10k"."""
    if not folder.is_dir():
        raise BadExampleError(
            f"{folder}: there is no such folder; install Debian's dataset-fashion-mnist, or name in data.root the "
            "folder with Fashion-MNIST's four .gz files"
        )
    pictures, classes = (read_idx(folder / f"{name}-{kind}-ubyte.gz") for kind in ("images-idx3", "labels-idx1"))
    if pictures.ndim != 3 or classes.shape != pictures.shape[:1] or not len(classes):
        raise BadExampleError(f"{folder}: {name} has pictures {pictures.shape} and classes {classes.shape}")
    scaled = torch.from_numpy(pictures.astype(np.float32)).div(255.0).unsqueeze(1)
    return scaled, torch.from_numpy(classes.astype(np.int64))
