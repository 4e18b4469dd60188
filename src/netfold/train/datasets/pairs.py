"""Pictures in two sizes, for super-resolution: crops to train on, held-out tiles, and the metric."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from skimage.io import imread
from torch import Tensor

from netfold.train.examples import BadExampleError, Batch, InMemory, Metric
from netfold.train.resolution import PSNR_BORDER_PIXELS, bicubic, psnr, smaller

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff")
"""Of files that are read as pictures."""


class Pair(NamedTuple):
    """A picture in two sizes, f32, 0..1."""

    low: Tensor
    """[3, h, w]"""
    truth: Tensor
    """[3, scale h, scale w]"""


def check(scale: int, patch: int, tiles: int | None) -> None:
    """Raise ValueError if no pair or no tile can be made."""
    if scale < 2:
        raise ValueError(f"data.scale is {scale}; set 2 or more")
    if tiles is not None and tiles < 1:
        raise ValueError(f"data.tiles is {tiles}; at least one tile must be held out")
    border = 2 * PSNR_BORDER_PIXELS
    if patch * scale <= border:
        raise ValueError(
            f"data.patch is {patch}: of {patch * scale} pixels on a side {border} are border, which PSNR leaves out; "
            f"set {border // scale + 1} or more"
        )


def read_picture(path: Path) -> Tensor:
    """Read a picture: [3, h, w] f32, 0..1; a grey one has three equal channels. Raises BadExampleError."""
    try:
        pixels = np.asarray(imread(path))
    except Exception as error:  # Decoders raise many types of errors for damaged files.
        raise BadExampleError(f"{path}: cannot be read as a picture: {type(error).__name__}: {error}") from error
    if pixels.ndim == 2:
        pixels = np.stack([pixels] * 3, axis=-1)
    if pixels.ndim != 3 or pixels.shape[2] not in (3, 4) or pixels.dtype not in (np.uint8, np.uint16):
        raise BadExampleError(
            f"{path}: a picture of shape {pixels.shape} and {pixels.dtype}; it must be grey or colour, of 8 or 16 bits"
        )
    largest = float(np.iinfo(pixels.dtype).max)
    return torch.from_numpy(pixels[:, :, :3].astype(np.float32)).permute(2, 0, 1).contiguous().div(largest)


def shrunk(picture: Tensor, scale: int) -> Pair:
    """Make a pair of one picture: cut to a multiple of `scale`, reduced by bicubic, rounded to 8 bits."""
    height, width = (side // scale for side in picture.shape[1:])
    truth = picture[:, : height * scale, : width * scale]
    return Pair(smaller(truth, scale), truth)


def tiles_of(pair: Pair, scale: int, patch: int) -> list[Pair]:
    """Adjacent tiles of a picture, without the rest at the right and at the bottom."""
    return [
        cut(pair, top, left, patch, scale)
        for top in range(0, pair[0].shape[1] - patch + 1, patch)
        for left in range(0, pair[0].shape[2] - patch + 1, patch)
    ]


def evenly(count: int, of: int) -> list[int]:
    """`count` of the numbers below `of`, evenly spaced; all of them if `count` is larger."""
    return [number * of // count for number in range(count)] if count < of else list(range(of))


def metric(tiles: Sequence[Pair], scale: int) -> Metric:
    """PSNR, with bicubic enlargement of the same tiles as the baseline."""
    scores = [psnr(bicubic(low, scale), truth) for low, truth in tiles]
    return Metric("psnr", "dB", "higher", psnr, float(torch.stack(scores).mean()), "bicubic")


class Crops:
    """Examples of patches: the number selects the picture, the seed the place, rotation and mirroring."""

    def __init__(self, pair: Callable[[int], Pair], pictures: int, scale: int, patch: int, length: int) -> None:
        """pair: the picture of a number below `pictures`, from memory or a file. length: number of examples."""
        self._pair, self._pictures, self._scale, self._patch, self._length = pair, pictures, scale, patch, length

    def __len__(self) -> int:
        return self._length

    def batch(self, indices: Sequence[int], seeds: Sequence[int]) -> Batch:
        crops = [
            self._one(self._pair(index % self._pictures), seed) for index, seed in zip(indices, seeds, strict=True)
        ]
        return Batch((torch.stack([low for low, _ in crops]),), torch.stack([truth for _, truth in crops]))

    def _one(self, pair: Pair, seed: int) -> Pair:
        draw = np.random.default_rng(seed)
        top, left = (int(draw.integers(extent - self._patch + 1)) for extent in pair[0].shape[-2:])
        low, truth = cut(pair, top, left, self._patch, self._scale)
        if draw.integers(2):
            low, truth = low.flip(2), truth.flip(2)
        if draw.integers(2):
            low, truth = low.transpose(1, 2), truth.transpose(1, 2)
        return Pair(low, truth)


def tiles(pairs: Sequence[Pair]) -> InMemory:
    """Examples of pairs of equal size; copies them."""
    return InMemory(torch.stack([low for low, _ in pairs]), target=torch.stack([truth for _, truth in pairs]))


def cut(pair: Pair, top: int, left: int, side: int, scale: int) -> Pair:
    return Pair(
        pair.low[:, top : top + side, left : left + side],
        pair.truth[:, top * scale : (top + side) * scale, left * scale : (left + side) * scale],
    )
