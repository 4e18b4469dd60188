"""Super-resolution's shared operations: reduce a picture, enlarge by the baseline, and measure the difference.

Pictures are tensors [..., 3, height, width], f32, red-green-blue, in 0..1.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

PSNR_BORDER_PIXELS = 4
# The value for equal pictures: finite, so that a mean over pictures is finite.
PSNR_AT_MOST_DB = 100.0


def to_8_bits(picture: Tensor) -> Tensor:
    """Round a picture as a file does: inside 0..1, in steps of 1/255."""
    return picture.clamp(0.0, 1.0).mul(255.0).round().div(255.0)


def smaller(truth: Tensor, scale: int) -> Tensor:
    """Reduce by antialiased bicubic, rounded to 8 bits. Sides of `truth` must be multiples of `scale`."""
    height, width = truth.shape[-2:]
    if height % scale or width % scale:
        raise ValueError(
            f"a picture of {height} x {width} pixels cannot be made {scale} times smaller; "
            f"cut its sides to multiples of {scale}"
        )
    return to_8_bits(_bicubic(truth, height // scale, width // scale))


def bicubic(low: Tensor, scale: int) -> Tensor:
    """Enlarge `scale` times by bicubic interpolation: the baseline, to which a network adds detail.

    Keys's kernel with a = -1/2, as in Pillow and Matlab's imresize. In torch this is the antialiased kernel, which is
    not widened when it enlarges. torch's other kernel (a = -3/4) is a weaker baseline.
    """
    height, width = low.shape[-2:]
    return _bicubic(low, height * scale, width * scale)


def psnr(picture: Tensor, truth: Tensor, *, border_pixels: int = PSNR_BORDER_PIXELS) -> Tensor:
    """Peak signal-to-noise ratio [...] in dB: over red, green and blue together, peak 1, without the border.

    Both are compared as 8-bit pictures. The border is left out, as is usual, because it depends on a guess about the
    pixels beyond the frame.
    """
    inside = (..., slice(border_pixels, -border_pixels or None), slice(border_pixels, -border_pixels or None))
    error = (to_8_bits(picture.float())[inside] - to_8_bits(truth)[inside]).double().square().mean((-3, -2, -1))
    return (-10.0 * torch.log10(error)).clamp_max(PSNR_AT_MOST_DB)


def _bicubic(picture: Tensor, height: int, width: int) -> Tensor:
    batch = picture.reshape(-1, *picture.shape[-3:])
    resized = functional.interpolate(batch, size=(height, width), mode="bicubic", antialias=True)
    return resized.reshape(*picture.shape[:-2], height, width)
