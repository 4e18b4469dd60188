"""Noisy pictures for diffusion models: a picture, a time step and noise -> the noise (Ho, Jain, Abbeel 2020, DDPM).

noisy = sqrt(kept[t]) picture + sqrt(1 - kept[t]) noise
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from pydantic import PositiveInt
from torch import Tensor

from netfold_train.data.examples import Batch, Data, InMemory, Metric, Panel, Pictures
from netfold_train.zoo.data.classes import FASHION_MNIST, fashion_part

STEPS = 1000
"""Time steps, from 0, which has the least noise."""
# The linear filter is fitted to this many training pictures: enough for 784 pixels, in less than a second.
_FITTED = 10_000
# The picture on the run's page: rows and columns of held-out pictures, at one time step.
_SHOWN, _SHOWN_STEP = (4, 8), 400


@functools.cache
def kept() -> Tensor:
    """[STEPS] f32: the share of the picture in the noisy picture's variance (alpha-bar), by DDPM's linear schedule."""
    return (1.0 - torch.linspace(1e-4, 0.02, STEPS, dtype=torch.float64)).cumprod(0).float()


def diffusion(root: str = FASHION_MNIST, held_out: PositiveInt = 2000) -> Data:
    """Fashion-MNIST with noise. Examples: noisy [1, 28, 28] f32, time step and class int64; target: the noise.

    Pictures are -1..1. An example's seed gives its time step, uniform in 0..999, and its noise. Held out are the first
    `held_out` test pictures, each with one time step and one noise.
    Metric: squared error of the noise, per pixel. Predicting 0 has an error of 1. Baseline: the best linear filter for
    each time step (Wiener), from the mean and covariance of 10 000 training pictures.
    """
    folder = Path(root)
    pictures, classes = fashion_part(folder, "train")
    held, held_classes = (each[:held_out] for each in fashion_part(folder, "t10k"))
    train, examples = Noisy(pictures * 2 - 1, classes), Noisy(held * 2 - 1, held_classes)
    wiener = Wiener.fit(train.pictures[:_FITTED])
    tried = examples.batch(range(len(examples)), range(len(examples)))
    noisy, step, _ = tried.inputs
    baseline = float(squared_error(wiener(noisy, step), tried.target).double().mean())
    metric = Metric("error", "", "lower", squared_error, baseline, "the best linear filter")
    return Data(train, examples, metric, _pictures(examples, wiener))


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """[n, ...], for each pixel."""
    return (output - target).square()


class Noisy:
    """`Examples` of pictures [n, c, h, w] in memory, with a new time step and noise for each seed."""

    def __init__(self, pictures: Tensor, classes: Tensor) -> None:
        self.pictures, self.classes = pictures, classes

    def __len__(self) -> int:
        return len(self.pictures)

    def batch(self, indices: Sequence[int], seeds: Sequence[int]) -> Batch:
        chosen = torch.tensor(list(indices))
        pictures = self.pictures[chosen]
        draws = [np.random.default_rng(seed) for seed in seeds]
        step = torch.tensor([int(draw.integers(STEPS)) for draw in draws])
        noise = torch.stack(
            [torch.from_numpy(draw.standard_normal(pictures.shape[1:], dtype=np.float32)) for draw in draws]
        )
        return Batch((add_noise(pictures, noise, step), step, self.classes[chosen]), noise)


def add_noise(pictures: Tensor, noise: Tensor, step: Tensor) -> Tensor:
    """step: int64 [n]; pictures and noise [n, c, h, w]."""
    share = kept()[step].view(-1, 1, 1, 1)
    return share.sqrt() * pictures + (1 - share).sqrt() * noise


def remove_noise(noisy: Tensor, noise: Tensor, step: Tensor) -> Tensor:
    """The pictures [n, c, h, w] if this is their noise, within -1..1. step: int64 [n]."""
    share = kept().to(noisy.device)[step].view(-1, 1, 1, 1)
    return ((noisy - (1 - share).sqrt() * noise) / share.sqrt()).clamp(-1, 1)


@dataclass(frozen=True)
class Wiener:
    """The linear estimate of the noise with the least squared error, if pictures have this mean and covariance."""

    mean: Tensor
    """f32 [pixels]."""
    variances: Tensor
    """f32 [pixels], along the columns of `axes`."""
    axes: Tensor
    """f32 [pixels, pixels]: the eigenvectors of the covariance."""

    @classmethod
    def fit(cls, pictures: Tensor) -> Wiener:
        """Cost: pixels^3 operations."""
        rows = pictures.flatten(1)
        variances, axes = torch.linalg.eigh(torch.cov(rows.T))
        return cls(rows.mean(0), variances.clamp_min(0), axes)

    def __call__(self, noisy: Tensor, step: Tensor) -> Tensor:
        """The noise of `noisy` [n, ...]; step: int64 [n]."""
        share = kept()[step][:, None]
        along = (noisy.flatten(1) - share.sqrt() * self.mean) @ self.axes
        found = (1 - share).sqrt() * along / (share * self.variances + 1 - share)
        return (found @ self.axes.T).view_as(noisy)


def _pictures(examples: Noisy, wiener: Wiener) -> Pictures:
    rows, columns = _SHOWN
    count = min(rows * columns, len(examples))
    truth, noise = examples.pictures[:count], examples.batch(range(count), range(count)).target
    step = torch.full((count,), _SHOWN_STEP)
    noisy = add_noise(truth, noise, step)

    def panels(outputs: Tensor) -> list[Panel]:
        shown = {
            "noisy": noisy,
            "the best linear filter": remove_noise(noisy, wiener(noisy, step), step),
            "the network": remove_noise(noisy, outputs, step),
            "truth": truth,
        }
        return [Panel(name, _error(each, truth), sheet(each, columns)) for name, each in shown.items()]

    return Pictures(InMemory(noisy, step, examples.classes[:count], target=noise), panels)


def _error(pictures: Tensor, truth: Tensor) -> str:
    if pictures is truth:
        return ""
    return f"root mean square error {math.sqrt(float(squared_error(pictures, truth).mean())) / 2:.3f} of the range"


def sheet(pictures: Tensor, columns: int) -> Tensor:
    """Pictures [n, 1 or 3, h, w] of -1..1 beside and below each other: u8 [3, ...]; missing ones are black."""
    count, channels, height, width = pictures.shape
    rows = -(-count // columns)
    filled = torch.cat([pictures, pictures.new_full((rows * columns - count, channels, height, width), -1.0)])
    grid = filled.view(rows, columns, channels, height, width).permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2)
    return ((grid.expand(3, -1, -1).clamp(-1, 1) + 1) * 127.5).round().byte()
