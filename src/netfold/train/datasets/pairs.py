"""Pictures in two sizes, for super-resolution: crops to train on, tiles that are held out, and what is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from skimage.io import imread
from torch import Tensor

from netfold.train.examples import BadExampleError, Batch, Metric
from netfold.train.resolution import PSNR_BORDER_PIXELS, bicubic, psnr, smaller


class Pair(NamedTuple):
    """A picture in two sizes, f32, 0..1."""

    low: Tensor
    """[3, h, w]"""
    truth: Tensor
    """[3, scale h, scale w]"""


def check(scale: int, patch: int, tiles: int | None) -> None:
    """ValueError where no pair or no tile can be made."""
    if scale < 2:
        raise ValueError(f"data.scale is {scale}; pictures are made smaller by 2 or more")
    if tiles is not None and tiles < 1:
        raise ValueError(f"data.tiles is {tiles}; at least one tile must be held out")
    border = 2 * PSNR_BORDER_PIXELS
    if patch * scale <= border:
        raise ValueError(
            f"data.patch is {patch}: of {patch * scale} pixels on a side {border} are border, which PSNR leaves out; "
            f"{border // scale + 1} or more will do"
        )


def read_picture(path: Path) -> Tensor:
    """[3, h, w] f32, 0..1; a grey one has three equal channels. Raises BadExampleError."""
    try:
        pixels = np.asarray(imread(path))
    except Exception as error:  # A decoder that meets garbage raises what it likes.
        raise BadExampleError(f"{path}: no picture can be read there: {type(error).__name__}: {error}") from error
    if pixels.ndim == 2:
        pixels = np.stack([pixels] * 3, axis=-1)
    if pixels.ndim != 3 or pixels.shape[2] not in (3, 4) or pixels.dtype not in (np.uint8, np.uint16):
        raise BadExampleError(
            f"{path}: a picture of shape {pixels.shape} and {pixels.dtype}; grey or colour of 8 or 16 bits is read"
        )
    largest = float(np.iinfo(pixels.dtype).max)
    return torch.from_numpy(pixels[:, :, :3].astype(np.float32)).permute(2, 0, 1).contiguous().div(largest)


def shrunk(picture: Tensor, scale: int) -> Pair:
    """Made from a picture alone: cut to a multiple of `scale`, made smaller by bicubic, and that in 8 bits."""
    height, width = (side // scale for side in picture.shape[1:])
    truth = picture[:, : height * scale, : width * scale]
    return Pair(smaller(truth, scale), truth)


def tiles_of(pair: Pair, scale: int, patch: int) -> list[Pair]:
    """Side by side over a picture; what is left at the right and below is left out."""
    return [
        cut(pair, top, left, patch, scale)
        for top in range(0, pair[0].shape[1] - patch + 1, patch)
        for left in range(0, pair[0].shape[2] - patch + 1, patch)
    ]


def evenly(count: int, of: int) -> list[int]:
    """`count` of the numbers below `of`, as far apart as they can be; all, where there are no more."""
    return [number * of // count for number in range(count)] if count < of else list(range(of))


def metric(tiles: Sequence[Pair], scale: int) -> Metric:
    """PSNR, against what bicubic enlargement reaches on the same tiles."""
    scores = [psnr(bicubic(low, scale), truth) for low, truth in tiles]
    return Metric("psnr", "dB", "higher", psnr, float(torch.stack(scores).mean()), "bicubic")


class Crops:
    """Patches of pictures: the example's number says of which, its seed where; turned and mirrored."""

    def __init__(self, pair: Callable[[int], Pair], pictures: int, scale: int, patch: int, length: int) -> None:
        """pair: the picture with a number below `pictures`, kept in memory or read anew; length: examples."""
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


class Tiles:
    """Pairs as they are."""

    def __init__(self, tiles: Sequence[Pair]) -> None:
        self.tiles = tiles

    def __len__(self) -> int:
        return len(self.tiles)

    def batch(self, indices: Sequence[int], seeds: Sequence[int]) -> Batch:
        chosen = [self.tiles[index] for index in indices]
        return Batch((torch.stack([low for low, _ in chosen]),), torch.stack([truth for _, truth in chosen]))


def cut(pair: Pair, top: int, left: int, side: int, scale: int) -> Pair:
    return Pair(
        pair.low[:, top : top + side, left : left + side],
        pair.truth[:, top * scale : (top + side) * scale, left * scale : (left + side) * scale],
    )
