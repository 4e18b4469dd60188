"""Photographs for super-resolution: those in the scikit-image wheel."""

from __future__ import annotations

import functools
from pathlib import Path

import skimage

from netfold.train.datasets import pairs
from netfold.train.datasets.mosaic import Mosaic
from netfold.train.datasets.pairs import Pair
from netfold.train.examples import Data
from netfold.train.resolution import psnr

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


def photos(scale: int = 2, patch: int = 24, patches: int = 4096, tiles: int | None = None) -> Data:
    """Patches of `patch` x `patch` low-resolution pixels; an epoch is `patches` of them, drawn anew.

    tiles: how many of the held-out pictures' are looked at, spread over all; without, all. The metric: PSNR; the
    baseline: bicubic enlargement.
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
        pairs.Tiles(kept),
        pairs.metric(kept, scale),
        Mosaic(held[HELD_OUT.index("chelsea.png")], scale, patch, psnr),
    )


@functools.cache
def photograph(name: str, scale: int) -> Pair:
    """One of those above, in two sizes, read once. By path from the installed package: nothing is downloaded."""
    return pairs.shrunk(pairs.read_picture(Path(skimage.__file__).parent / "data" / name), scale)
