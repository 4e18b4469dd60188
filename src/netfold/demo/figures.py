"""The charts (inline SVG) and the picture strip (PNG in `data:` addresses) of the report.

Colours in the charts are the page's CSS variables, so that light and dark both read well.
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imsave
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from torch import Tensor

from netfold.bench.figures import chart
from netfold.demo.agreement import Agreement
from netfold.demo.experiment import Experiment, HeldOut
from netfold.demo.settings import SCALE
from netfold.train.resolution import psnr

# Side of a crop in pixels of the truth, and the grid on which crops may lie.
CROP_PIXELS = 80
CROP_GRID_PIXELS = 16


@dataclass(frozen=True)
class Crop:
    """A detail of a held-out photograph; pictures as `data:` addresses, with dB within the crop."""

    top: int
    left: int
    low: str
    bicubic: str
    netfold: str
    truth: str
    bicubic_psnr: float
    netfold_psnr: float


def loss_curves(story: Experiment) -> str:
    """Both backends' losses over each other, and bicubic's on the same batches."""
    figure, axes = _chart(height=3.6)
    steps = np.arange(1, story.training.steps + 1)
    axes.plot(steps, story.bicubic_losses, color=chart.QUIET, linewidth=1.0, label="bicubic, same patches")
    # Wide below narrow: where the two agree, both show.
    axes.plot(steps, story.gloo.losses, color=chart.GLOO, linewidth=4.5, solid_capstyle="round", label="gloo")
    axes.plot(steps, story.netfold.losses, color=chart.NETFOLD, linewidth=1.3, label="netfold")
    axes.set_xlabel("step")
    axes.set_ylabel("L1 loss of the global batch")
    axes.set_xlim(1, story.training.steps)
    _legend(axes)
    return chart.svg(figure, "loss curves of netfold and gloo")


def deviations(agreement: Agreement) -> str:
    """|loss - gloo's loss| a step: netfold over the band that gloo's own permutations span."""
    figure, axes = _chart(height=2.8)
    steps = np.arange(1, agreement.steps + 1)
    largest = np.maximum.accumulate(agreement.gloo_differences, axis=1)
    floor = 1e-10
    axes.fill_between(steps, floor, largest.max(axis=0), color=chart.GLOO, alpha=0.28, linewidth=0)
    for index, differences in enumerate(agreement.gloo_differences):
        label = "gloo, ranks permuted (band: the largest so far)" if index == 0 else None
        axes.plot(
            steps, _where_positive(differences), color=chart.GLOO, marker=".", markersize=5, linewidth=0.8, label=label
        )
    axes.plot(
        steps,
        _where_positive(agreement.difference),
        color=chart.NETFOLD,
        marker="o",
        markersize=4,
        linewidth=1.3,
        label="netfold",
    )
    axes.set_yscale("log")
    chart.name_powers(axes)
    axes.set_ylim(floor, max(1e-6, 4 * float(max(largest.max(), agreement.difference.max()))))
    axes.set_xlim(1, agreement.steps)
    axes.set_xlabel("step")
    axes.set_ylabel("|loss − loss of gloo|")
    _legend(axes)
    return chart.svg(figure, "difference of the losses from those of gloo")


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
    pixels = picture.clamp(0, 1).mul(255).round().byte().permute(1, 2, 0).numpy()
    imsave(buffer, np.ascontiguousarray(pixels), format="png")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _window(picture: Tensor, top: int, left: int, side: int) -> Tensor:
    return picture[..., top : top + side, left : left + side]


def _where_positive(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """On a logarithmic axis "no difference at all" has no place: the curve is left open there."""
    return np.where(values > 0, values, np.nan)


def _chart(height: float) -> tuple[Figure, Axes]:
    figure = chart.blank(height)
    axes = figure.add_subplot()
    chart.dress(axes)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes


def _legend(axes: Axes) -> None:
    """In one line above the chart, where it covers nothing."""
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2, frameon=False, labelcolor=chart.TEXT
    )
