"""Photographs in two sizes, for super-resolution: those in the scikit-image wheel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import skimage
import torch
from skimage.io import imread
from torch import Tensor
from torch.nn import functional

from netfold.train.datasets.mosaic import Mosaic
from netfold.train.examples import Batch, Data, Metric

TRAINING = (
    "brick.png",
    "coins.png",
    "grass.png",
    "gravel.png",
    "ihc.png",
    # Two views of one scene: they stay on the same side of the split.
    "motorcycle_left.png",
    "motorcycle_right.png",
    "page.png",
    "rocket.jpg",
)
HELD_OUT = ("astronaut.png", "camera.png", "chelsea.png", "coffee.png")
BORDER_PIXELS = 4


def photos(scale: int = 2, patch: int = 24, patches: int = 4096) -> Data:
    """Patches of `patch` x `patch` low-resolution pixels; an epoch is `patches` of them, drawn anew."""
    folder = Path(skimage.__file__).parent / "data"
    train, held = ([_pair(folder / name, scale) for name in names] for names in (TRAINING, HELD_OUT))
    tiles = Tiles(held, scale, patch)
    large = torch.cat(
        [
            functional.interpolate(low[None], scale_factor=scale, mode="bicubic", antialias=True)
            for low, _ in tiles.tiles
        ]
    )
    truth = torch.stack([truth for _, truth in tiles.tiles])
    return Data(
        Crops(train, scale, patch, patches),
        tiles,
        Metric("psnr", "dB", "higher", psnr, float(psnr(large, truth).mean()), "bicubic"),
        Mosaic(held[HELD_OUT.index("chelsea.png")], scale, patch, psnr),
    )


def psnr(picture: Tensor, truth: Tensor) -> Tensor:
    """[n] dB: over red, green and blue together, as 8-bit pictures, without the border (it has no neighbours)."""
    inside = (..., slice(BORDER_PIXELS, -BORDER_PIXELS), slice(BORDER_PIXELS, -BORDER_PIXELS))
    error = (_to_8_bits(picture)[inside] - _to_8_bits(truth)[inside]).double().square().mean((1, 2, 3))
    return -10.0 * torch.log10(error.clamp_min(1e-10))


class Crops:
    """Patches drawn anew each time, turned and mirrored."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]], scale: int, patch: int, length: int) -> None:
        self._pairs, self._scale, self._patch, self._length = pairs, scale, patch, length

    def __len__(self) -> int:
        return self._length

    def batch(self, indices: Sequence[int], seeds: Sequence[int]) -> Batch:
        patches = [self._one(seed) for seed in seeds]
        return Batch((torch.stack([low for low, _ in patches]),), torch.stack([truth for _, truth in patches]))

    def _one(self, seed: int) -> tuple[Tensor, Tensor]:
        draw = np.random.default_rng(seed)
        pair = self._pairs[int(draw.integers(len(self._pairs)))]
        top, left = (int(draw.integers(extent - self._patch + 1)) for extent in pair[0].shape[-2:])
        low, truth = _cut(pair, top, left, self._patch, self._scale)
        if draw.integers(2):
            low, truth = low.flip(2), truth.flip(2)
        if draw.integers(2):
            low, truth = low.transpose(1, 2), truth.transpose(1, 2)
        return low, truth


class Tiles:
    """Patches side by side over each picture."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]], scale: int, patch: int) -> None:
        self.tiles = [
            _cut(pair, top, left, patch, scale)
            for pair in pairs
            for top in range(0, pair[0].shape[1] - patch + 1, patch)
            for left in range(0, pair[0].shape[2] - patch + 1, patch)
        ]

    def __len__(self) -> int:
        return len(self.tiles)

    def batch(self, indices: Sequence[int], seeds: Sequence[int]) -> Batch:
        chosen = [self.tiles[index] for index in indices]
        return Batch((torch.stack([low for low, _ in chosen]),), torch.stack([truth for _, truth in chosen]))


def _pair(path: Path, scale: int) -> tuple[Tensor, Tensor]:
    """Low resolution [3, h, w] and truth [3, scale h, scale w], f32, 0..1; a grey one has three equal channels."""
    pixels = np.asarray(imread(path))
    if pixels.ndim == 2:
        pixels = np.stack([pixels] * 3, axis=-1)
    height, width = (side // scale * scale for side in pixels.shape[:2])
    truth = torch.from_numpy(pixels[:height, :width, :3].copy()).permute(2, 0, 1).float().div(255.0)
    low = functional.interpolate(truth[None], size=(height // scale, width // scale), mode="bicubic", antialias=True)[0]
    return _to_8_bits(low), truth


def _cut(pair: tuple[Tensor, Tensor], top: int, left: int, side: int, scale: int) -> tuple[Tensor, Tensor]:
    low, truth = pair
    return low[:, top : top + side, left : left + side], truth[
        :, top * scale : (top + side) * scale, left * scale : (left + side) * scale
    ]


def _to_8_bits(picture: Tensor) -> Tensor:
    return picture.clamp(0.0, 1.0).mul(255.0).round().div(255.0)
