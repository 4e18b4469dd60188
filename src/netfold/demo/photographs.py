"""The photographs inside the scikit-image wheel: which are trained on, which are held out.

Read by path from the installed package: nothing is downloaded.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import skimage
import torch
from skimage.io import imread
from torch import Tensor

from netfold.demo.settings import SCALE

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


def load(name: str) -> Tensor:
    """One photograph [3, height, width], f32, 0..1, cut to even sides; a grey one has three equal channels."""
    pixels = np.asarray(imread(Path(skimage.__file__).parent / "data" / name))
    if pixels.ndim == 2:
        pixels = np.stack([pixels] * 3, axis=-1)
    height, width = (side // SCALE * SCALE for side in pixels.shape[:2])
    return torch.from_numpy(pixels[:height, :width].copy()).permute(2, 0, 1).float().div(255.0)
