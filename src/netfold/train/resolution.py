"""Down, up by the baseline, and how near to the truth: what super-resolution's model, data and metric share.

Pictures are tensors [..., 3, height, width], f32, red-green-blue, in 0..1.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

PSNR_BORDER_PIXELS = 4
# Of equal pictures: finite, so that a mean over pictures is a number.
PSNR_AT_MOST_DB = 100.0


def to_8_bits(picture: Tensor) -> Tensor:
    """The picture as a file would keep it: inside 0..1, in steps of 1/255."""
    return picture.clamp(0.0, 1.0).mul(255.0).round().div(255.0)


def smaller(truth: Tensor, scale: int) -> Tensor:
    """By antialiased bicubic, kept in 8 bits. Sides of `truth` must be multiples of `scale`."""
    height, width = truth.shape[-2:]
    if height % scale or width % scale:
        raise ValueError(
            f"a picture of {height} x {width} pixels cannot be made {scale} times smaller; "
            f"cut its sides to multiples of {scale}"
        )
    return to_8_bits(_bicubic(truth, height // scale, width // scale))


def bicubic(low: Tensor, scale: int) -> Tensor:
    """`scale` times as large by bicubic interpolation: the baseline, and what a network adds its detail to.

    Keys's kernel with a = -1/2, as in Pillow and Matlab's imresize: in torch that is the antialiased kernel,
    which is not widened when it enlarges. torch's other one (a = -3/4) is a weaker baseline.
    """
    height, width = low.shape[-2:]
    return _bicubic(low, height * scale, width * scale)


def psnr(picture: Tensor, truth: Tensor, *, border_pixels: int = PSNR_BORDER_PIXELS) -> Tensor:
    """Peak signal-to-noise ratio [...] in dB: over red, green and blue together, peak 1, without the border.

    Both are compared as 8-bit pictures. The border is left out, as is usual, because what lies beyond the
    frame is a guess that says nothing about the method.
    """
    inside = (..., slice(border_pixels, -border_pixels or None), slice(border_pixels, -border_pixels or None))
    error = (to_8_bits(picture.float())[inside] - to_8_bits(truth)[inside]).double().square().mean((-3, -2, -1))
    return (-10.0 * torch.log10(error)).clamp_max(PSNR_AT_MOST_DB)


def _bicubic(picture: Tensor, height: int, width: int) -> Tensor:
    batch = picture.reshape(-1, *picture.shape[-3:])
    resized = functional.interpolate(batch, size=(height, width), mode="bicubic", antialias=True)
    return resized.reshape(*picture.shape[:-2], height, width)
