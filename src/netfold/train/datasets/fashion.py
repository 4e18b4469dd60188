"""Fashion-MNIST: 70 000 grey pictures of ten kinds of clothes (Xiao, Rasul, Vollgraf 2017), as Debian packs it."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from netfold.train.datasets.classes import accuracy, nearest_mean
from netfold.train.examples import BadExampleError, Batch, Data

_DTYPE_U8 = 0x08


def fashion_mnist(root: str = "/usr/share/datasets/fashion-mnist", held_out: int | None = None) -> Data:
    """Examples: [1, 28, 28] f32, with mean 0 and deviation 1 over the training part; the class, 0..9. About 220 MB.

    The held-out ones are the set's own 10 000 for tests; `held_out`: the first so many of them. Reads the four IDX
    files, gzipped, under `root`. The metric: accuracy; the baseline: the class whose mean picture is nearest.
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
        InMemoryPictures(pictures, classes),
        InMemoryPictures(held, held_classes),
        accuracy(baseline, "the nearest class mean"),
    )


class InMemoryPictures:
    """Pictures in memory, as they are."""

    def __init__(self, pictures: Tensor, classes: Tensor) -> None:
        self.pictures, self.classes = pictures, classes

    def __len__(self) -> int:
        return len(self.pictures)

    def batch(self, indices: Sequence[int], seeds: Sequence[int]) -> Batch:
        chosen = torch.tensor(list(indices))
        return Batch((self.pictures[chosen],), self.classes[chosen])


def read_idx(path: Path) -> NDArray[np.uint8]:
    """An array of bytes in the IDX format: 0, 0, type, dimensions, their sizes (big-endian u32), the bytes. Gzipped."""
    try:
        raw = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise BadExampleError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if len(raw) < 4 or raw[:3] != bytes((0, 0, _DTYPE_U8)):
        raise BadExampleError(f"{path}: it begins with {raw[:4].hex()}; an IDX file of bytes begins with 000008")
    begin = 4 + 4 * raw[3]
    shape = [int.from_bytes(raw[at : at + 4], "big") for at in range(4, begin, 4)]
    if len(raw) != begin + int(np.prod(shape)):
        raise BadExampleError(f"{path}: {len(raw) - begin} bytes behind a header that says {shape}")
    return np.frombuffer(raw, np.uint8, offset=begin).reshape(shape)


def _part(folder: Path, name: str) -> tuple[Tensor, Tensor]:
    pictures, classes = (read_idx(folder / f"{name}-{kind}-ubyte.gz") for kind in ("images-idx3", "labels-idx1"))
    if pictures.ndim != 3 or classes.shape != pictures.shape[:1] or not len(classes):
        raise BadExampleError(f"{folder}: {name} has pictures {pictures.shape} and classes {classes.shape}")
    scaled = torch.from_numpy(pictures.astype(np.float32)).div(255.0).unsqueeze(1)
    return scaled, torch.from_numpy(classes.astype(np.int64))
