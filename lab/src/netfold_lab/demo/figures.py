"""The charts and the pictures of the report."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

import numpy as np
from PIL import Image
from torch import Tensor

from netfold import units
from netfold.page.chart import Axis, Chart
from netfold_lab.demo.agreement import Agreement
from netfold_lab.demo.experiment import Experiment, HeldOut
from netfold_lab.demo.settings import SCALE
from netfold_train.zoo.data.resolution import psnr

# Side of a crop in pixels of the truth, and the grid on which crops may lie.
CROP_PIXELS = 80
CROP_GRID_PIXELS = 16
# The smallest difference that the chart of differences shows.
_LEAST_DIFFERENCE = 1e-10


@dataclass(frozen=True)
class Crop:
    """A detail of a held-out photograph; pictures as `data:` addresses, with PSNR in dB within the crop."""

    top: int
    left: int
    low: str
    bicubic: str
    netfold: str
    truth: str
    bicubic_psnr: float
    netfold_psnr: float


def loss_curves(story: Experiment) -> str:
    """The losses of both backends, and of bicubic on the same batches."""
    losses = (story.bicubic_losses, story.gloo.losses, story.netfold.losses)
    across = Axis("step", 1, story.training.steps, units.count, least_step=1)
    low, high = 0.95 * min(map(min, losses)), 1.05 * max(map(max, losses))
    chart = Chart(across, Axis("L1 loss of the global batch", low, high, units.digits))
    # The thick line is below the thin line: where they are equal, both are visible.
    looks = (("quiet", "bicubic, same patches", ""), ("0", "gloo", "thick"), ("1", "netfold", ""))
    for (ink, label, kind), values in zip(looks, losses, strict=True):
        chart.line(ink, list(enumerate(values, 1)), label, kind=kind)
    return chart.render(
        "loss curves of netfold and gloo",
        "Every step of both trainings, not smoothed. The loss goes up and down because patches differ. An untrained "
        "network is exactly bicubic (grey), so the distance below the grey line is learnt.",
        height_rem=18,
    )


def deviations(agreement: Agreement) -> str:
    """|loss - gloo's loss| of each step: netfold, over the range of gloo's own permutations."""
    largest = np.maximum.accumulate(agreement.gloo_differences, axis=1).max(axis=0)
    most = max(1e-6, 4 * float(max(largest.max(), agreement.difference.max())))
    across = Axis("step", 1, agreement.steps, units.count, least_step=1)
    chart = Chart(across, Axis("|loss − loss of gloo|", _LEAST_DIFFERENCE, most, units.digits, base=10))
    chart.area("0", list(enumerate(largest.tolist(), 1)), "gloo, ranks permuted: the largest so far", kind="faint")
    for number, differences in enumerate(agreement.gloo_differences.tolist()):
        chart.line("0", _positive(differences), "gloo, ranks permuted" if number == 0 else "", dots=True)
    chart.line("1", _positive(agreement.difference.tolist()), "netfold", dots=True)
    return chart.render(
        "difference of the losses from those of gloo",
        "Difference of the loss from gloo's in each step, on a logarithmic scale. Steps without any difference are "
        "left open.",
        height_rem=15,
    )


def crop(photograph: HeldOut) -> Crop:
    """The window in which bicubic errs most, whatever the network does there."""
    error = (photograph.bicubic - photograph.pair.truth).abs().sum(dim=0)
    height, width = error.shape
    corners = [
        (top, left)
        for top in range(0, height - CROP_PIXELS + 1, CROP_GRID_PIXELS)
        for left in range(0, width - CROP_PIXELS + 1, CROP_GRID_PIXELS)
    ]
    top, left = max(corners, key=lambda corner: float(_window(error, corner[0], corner[1], CROP_PIXELS).sum()))
    bicubic, netfold, truth = (
        _window(picture, top, left, CROP_PIXELS)
        for picture in (photograph.bicubic, photograph.netfold, photograph.pair.truth)
    )
    low = _window(photograph.pair.low, top // SCALE, left // SCALE, CROP_PIXELS // SCALE)
    return Crop(
        top=top,
        left=left,
        low=png(low),
        bicubic=png(bicubic),
        netfold=png(netfold),
        truth=png(truth),
        bicubic_psnr=float(psnr(bicubic, truth, border_pixels=0)),
        netfold_psnr=float(psnr(netfold, truth, border_pixels=0)),
    )


def png(picture: Tensor) -> str:
    """A picture [3, height, width], 0..1, as a `data:` address."""
    buffer = io.BytesIO()
    pixels = picture.clamp(0, 1).mul(255).round().byte().permute(1, 2, 0).contiguous().numpy()
    Image.fromarray(pixels).save(buffer, format="png")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _window(picture: Tensor, top: int, left: int, side: int) -> Tensor:
    return picture[..., top : top + side, left : left + side]


def _positive(values: list[float]) -> list[tuple[float, float | None]]:
    """The points of a line. A logarithmic axis has no place for a difference of 0: the line is interrupted there."""
    return [(step, value if value > 0 else None) for step, value in enumerate(values, 1)]
