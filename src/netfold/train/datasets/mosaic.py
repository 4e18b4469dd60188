"""A part of a held-out photograph, enlarged: by repeating pixels, by bicubic interpolation, by the network; the truth.

The network sees patches as large as those it was trained on. They overlap: what it makes of a patch's edge, which has
no neighbours there, is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from netfold.train.examples import Batch, Panel
from netfold.train.resolution import bicubic

# Patches across and down, at most: as much as one can look at, and cheap beside an evaluation.
_SIDE = 6


class Mosaic:
    """Pictures of the middle of one photograph; see `netfold.train.examples.Pictures`."""

    def __init__(
        self, pair: tuple[Tensor, Tensor], scale: int, patch: int, psnr: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        """pair: low resolution [3, h, w] and truth [3, scale h, scale w], f32, 0..1. psnr: (picture, truth) of
        [n, 3, h, w] -> [n] dB. The photograph must be larger than a patch."""
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
