"""A diffusion transformer (Peebles and Xie 2023, DiT): noisy pictures, time steps, classes -> the noise.

Two tensors pass through the chain: the patches' features, and the condition (time step and class), which sets scales
and shifts of every block's norms, and how much of its result is added (adaLN-Zero, section 3.2). Blocks start as the
identity, and the untrained network predicts 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from pydantic import PositiveInt
from torch import Tensor, nn
from torch.nn import functional

from netfold_train.models.model import Chain, Model, Style
from netfold_train.zoo.data.diffusion import STEPS, kept, remove_noise, squared_error
from netfold_train.zoo.models.linear import named
from netfold_train.zoo.models.transformer import Attention, transformer_plan

_FREQUENCIES = 128


def dit(
    size: PositiveInt = 28,
    channels: PositiveInt = 1,
    classes: PositiveInt = 10,
    patch: PositiveInt = 4,
    width: PositiveInt = 128,
    heads: PositiveInt = 4,
    layers: PositiveInt = 4,
    mlp: PositiveInt = 4,
) -> Model:
    """(f32 [n, channels, size, size], time steps int64 [n], classes int64 [n]) -> the noise, f32, as the first.

    size: pixels on a side, a multiple of `patch`. The loss is the squared error of each pixel. Positions are learnt,
    variances are not (section 3.1), and no class is left out (no guidance).
    """
    if size % patch:
        raise ValueError(f"model.size {size} is not a multiple of model.patch {patch}")
    parts: list[tuple[str, nn.Module]] = [("embedding", _Start(size // patch, channels, classes, patch, width))]
    parts += [(f"block{number}", DitBlock(width, heads, mlp * width)) for number in range(layers)]
    parts += [("head", _Head(size // patch, channels, patch, width))]
    cuts = transformer_plan(layers, width // heads)

    def plan(style: Style, sequence: bool) -> Mapping[str, Any]:
        if sequence:
            raise ValueError("parallel.sequence: dit does not cut its patches; use sequence = false")
        return cuts(style, False)

    return Model(Chain(parts), squared_error, tensor_plan=plan)


class _Start(nn.Module):
    """-> (features [n, patches, width], condition [n, width])."""

    def __init__(self, side: int, channels: int, classes: int, patch: int, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.position = nn.Embedding(side * side, width)
        up, out = nn.Linear(2 * _FREQUENCIES, width), nn.Linear(width, width)
        self.time = named(up=up, silu=nn.SiLU(), out=out)
        self.label = nn.Embedding(classes, width)
        nn.init.xavier_uniform_(self.patches.weight.data.view(width, -1))
        for each in (self.position.weight, self.label.weight, up.weight, out.weight):
            nn.init.normal_(each, std=0.02)

    def forward(self, noisy: Tensor, step: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        x = self.patches(noisy).flatten(2).mT
        x = x + self.position(torch.arange(x.shape[1], device=x.device))
        # Sines of the step, with periods from 2 pi to 10 000 x 2 pi (Vaswani et al. 2017).
        rates = torch.arange(_FREQUENCIES, device=x.device) * (-math.log(10_000) / _FREQUENCIES)
        angles = step[:, None] * rates.exp()
        waves = torch.cat([angles.cos(), angles.sin()], 1).to(self.position.weight.dtype)
        condition: Tensor = self.time(waves) + self.label(label)
        return x, condition


class Modulation(nn.Module):
    """condition [n, width] -> `count` tensors [n, 1, width]; all 0 at first."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.linear = nn.Linear(width, count * width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, condition: Tensor) -> tuple[Tensor, ...]:
        found: Tensor = self.linear(functional.silu(condition))
        return found.unsqueeze(1).chunk(self.count, -1)


class DitBlock(nn.Module):
    """(x [n, patches, width], condition [n, width]) -> the same."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        # Without weights of their own: the condition gives scale and shift.
        self.attention_norm, self.mlp_norm = (nn.LayerNorm(width, 1e-6, elementwise_affine=False) for _ in range(2))
        self.attention = Attention(width, heads, causal=False)
        self.mlp = named(up=nn.Linear(width, hidden), gelu=nn.GELU("tanh"), down=nn.Linear(hidden, width))
        for part in (self.attention, self.mlp):
            for layer in part.modules():
                if isinstance(layer, nn.Linear):
                    nn.init.xavier_uniform_(layer.weight)
                    nn.init.zeros_(layer.bias)
        self.modulation = Modulation(width, 6)

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(condition)
        x = x + gate * self.attention(self.attention_norm(x) * (1 + scale) + shift)
        x = x + mlp_gate * self.mlp(self.mlp_norm(x) * (1 + mlp_scale) + mlp_shift)
        return x, condition


class _Head(nn.Module):
    """(x, condition) -> pictures [n, channels, side patch, side patch]; 0 at first."""

    def __init__(self, side: int, channels: int, patch: int, width: int) -> None:
        super().__init__()
        self.side, self.channels, self.patch = side, channels, patch
        self.norm = nn.LayerNorm(width, 1e-6, elementwise_affine=False)
        self.modulation = Modulation(width, 2)
        self.pixels = nn.Linear(width, channels * patch * patch)
        nn.init.zeros_(self.pixels.weight)
        nn.init.zeros_(self.pixels.bias)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale = self.modulation(condition)
        pixels = self.pixels(self.norm(x) * (1 + scale) + shift)
        grid: Tensor = pixels.view(-1, self.side, self.side, self.channels, self.patch, self.patch)
        return grid.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)


@torch.no_grad()
def sample(
    predict: Callable[[Tensor, Tensor, Tensor], Tensor], noise: Tensor, classes: Tensor, steps: int = 50
) -> Tensor:
    """Pictures [n, c, h, w] f32, -1..1, from noise, without further random numbers (DDIM: Song et al. 2021, eta 0).

    predict: (noisy, time steps, classes) -> noise, such as a trained `dit` in evaluation mode. classes: int64 [n].
    Cost: `steps` passes of all pictures.
    """
    times = torch.linspace(STEPS - 1, 0, steps).round().long().tolist()
    shares = kept().tolist()
    x = picture = noise
    for number, time in enumerate(times):
        step = torch.full((len(x),), time, device=x.device)
        picture = remove_noise(x, predict(x, step, classes), step)
        if number + 1 < len(times):
            # The noise that belongs to the picture after its values were limited.
            left = (x - math.sqrt(shares[time]) * picture) / math.sqrt(1 - shares[time])
            onward = shares[times[number + 1]]
            x = math.sqrt(onward) * picture + math.sqrt(1 - onward) * left
    return picture
