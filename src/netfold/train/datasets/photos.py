"""Super-resolution of the photographs in the scikit-image wheel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import skimage
import torch
from torch import Tensor
from torch.nn import functional

from netfold.train.datasets import pairs
from netfold.train.datasets.pairs import Pair
from netfold.train.examples import Batch, Data, Panel
from netfold.train.resolution import bicubic, psnr

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
# The largest number of patches in each direction: a picture of this size is cheap compared with an evaluation.
_SIDE = 6


def photos(scale: int = 2, patch: int = 24, patches: int = 4096, tiles: int | None = None) -> Data:
    """Patches of `patch` x `patch` low-resolution pixels; an epoch is `patches` random ones.

    tiles: held-out tiles to evaluate, evenly chosen; without it all. Metric: PSNR. Baseline: bicubic enlargement.
    """
    pairs.check(scale, patch, tiles)
    train, held = ([photograph(name, scale) for name in names] for names in (TRAINING, HELD_OUT))
    if patch > (least := min(side for low, _ in (*train, *held) for side in low.shape[1:])):
        raise ValueError(
            f"data.patch is {patch}; the smallest side of a photograph has {least} pixels at data.scale {scale}"
        )
    found = [tile for pair in held for tile in pairs.tiles_of(pair, scale, patch)]
    kept = [found[place] for place in pairs.evenly(len(found) if tiles is None else tiles, len(found))]
    return Data(
        pairs.Crops(train.__getitem__, len(train), scale, patch, patches),
        pairs.tiles(kept),
        pairs.metric(kept, scale),
        Mosaic(held[HELD_OUT.index("chelsea.png")], scale, patch, psnr),
    )


@functools.cache
def photograph(name: str, scale: int) -> Pair:
    """A photograph of the installed package in two sizes, read once; nothing is downloaded."""
    return pairs.shrunk(pairs.read_picture(Path(skimage.__file__).parent / "data" / name), scale)


class Mosaic:
    """`Pictures` of the middle of a held-out photograph: repeated pixels, bicubic, the network's output, the truth.

    The network computes patches of the training size. They overlap, and the edges of its outputs, which have no
    neighbours, are left out.
    """

    def __init__(
        self, pair: tuple[Tensor, Tensor], scale: int, patch: int, psnr: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        """pair: low resolution [3, h, w] and truth [3, scale h, scale w], f32, 0..1; larger than a patch.

        psnr: (picture, truth) of [n, 3, h, w] -> [n] dB.
        """
        low, truth = pair
        self._scale, self._patch, self._psnr = scale, patch, psnr
        self._margin = patch // 6
        self._step = patch - 2 * self._margin
        self._rows, self._columns = (
            min(_SIDE, (side - 2 * self._margin) // self._step) for side in (low.shape[1], low.shape[2])
        )
        height, width = (count * self._step + 2 * self._margin for count in (self._rows, self._columns))
        top, left = (low.shape[1] - height) // 2, (low.shape[2] - width) // 2
        self._low = low[:, top : top + height, left : left + width]
        self._truth = truth[:, top * scale : (top + height) * scale, left * scale : (left + width) * scale]

    def __len__(self) -> int:
        return self._rows * self._columns

    def batch(self, indices: Sequence[int]) -> Batch:
        lows = torch.stack([self._cut(self._low, index, 1) for index in indices])
        return Batch((lows,), torch.stack([self._cut(self._truth, index, self._scale) for index in indices]))

    def panels(self, outputs: Tensor) -> list[Panel]:
        edge, step = self._margin * self._scale, self._step * self._scale
        inner = outputs[:, :, edge : edge + step, edge : edge + step]
        rows = inner.reshape(self._rows, self._columns, 3, step, step)
        network = rows.permute(2, 0, 3, 1, 4).reshape(3, self._rows * step, self._columns * step)
        repeated = functional.interpolate(self._low[None], scale_factor=self._scale, mode="nearest")[0]
        enlarged, truth = bicubic(self._low, self._scale), self._inside(self._truth)
        shown = [("low resolution", self._inside(repeated)), ("bicubic", self._inside(enlarged)), ("network", network)]
        panels = [Panel(name, f"{self._reached(made, truth):.2f} dB", _pixels(made)) for name, made in shown]
        return [*panels, Panel("truth", "", _pixels(truth))]

    def _reached(self, picture: Tensor, truth: Tensor) -> float:
        return float(self._psnr(picture[None], truth[None]))

    def _cut(self, picture: Tensor, index: int, scale: int) -> Tensor:
        row, column = divmod(index, self._columns)
        top, left, side = row * self._step * scale, column * self._step * scale, self._patch * scale
        return picture[:, top : top + side, left : left + side]

    def _inside(self, picture: Tensor) -> Tensor:
        edge = self._margin * self._scale
        return picture[:, edge : picture.shape[1] - edge, edge : picture.shape[2] - edge]


def _pixels(picture: Tensor) -> Tensor:
    return picture.clamp(0.0, 1.0).mul(255.0).round().to(torch.uint8)
