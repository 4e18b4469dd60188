"""Down, up by the baseline, and how near to the truth: the three things every row of the table shares.

Pictures are tensors [..., 3, height, width], f32, red-green-blue, in 0..1.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from netfold.demo.settings import SCALE

PSNR_BORDER_PIXELS = 4


def to_8_bits(picture: Tensor) -> Tensor:
    """The picture as a file would keep it: inside 0..1, in steps of 1/255."""
    return picture.clamp(0.0, 1.0).mul(255.0).round().div(255.0)


def low_resolution(truth: Tensor) -> Tensor:
    """Half the size by antialiased bicubic, kept in 8 bits. Sides of `truth` must be even."""
    height, width = truth.shape[-2:]
    if height % SCALE or width % SCALE:
        raise ValueError(f"a picture of {height} x {width} pixels cannot be halved; cut it to even sides")
    return to_8_bits(_bicubic(truth, height // SCALE, width // SCALE))


def bicubic(low: Tensor) -> Tensor:
    """Twice the size by bicubic interpolation: the baseline, and what the network adds its detail to.

    Keys's kernel with a = -1/2, as in Pillow and Matlab's imresize: in torch that is the antialiased kernel,
    which is not widened when it enlarges. torch's other one (a = -3/4) is a weaker baseline.
    """
    height, width = low.shape[-2:]
    return _bicubic(low, height * SCALE, width * SCALE)


def _bicubic(picture: Tensor, height: int, width: int) -> Tensor:
    batch = picture.reshape(-1, *picture.shape[-3:])
    resized = functional.interpolate(batch, size=(height, width), mode="bicubic", antialias=True)
    return resized.reshape(*picture.shape[:-2], height, width)


def psnr(picture: Tensor, truth: Tensor, *, border_pixels: int = PSNR_BORDER_PIXELS) -> float:
    """Peak signal-to-noise ratio in dB: over red, green and blue together, peak 1, without the border.

    Both are compared as 8-bit pictures. The border is left out, as is usual, because what lies beyond the
    frame is a guess that says nothing about the method. Infinite for equal pictures.
    """
    inside = (..., slice(border_pixels, -border_pixels or None), slice(border_pixels, -border_pixels or None))
    error = (to_8_bits(picture)[inside] - to_8_bits(truth)[inside]).double().square().mean()
    return float(-10.0 * torch.log10(error))
