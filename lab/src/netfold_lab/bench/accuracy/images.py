"""A task: a small ResNet learns to tell small pictures of ten kinds apart.

A picture is 16 x 16 in colour, drawn by a formula: one of five shapes, striped across or along, near the middle, in
random colours, with noise.
"""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

CLASSES = 10
SIDE = 16
NOISE = 0.6


def pictures(count: int, seed: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """[count, 3, 16, 16] f32 and [count] i64."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, CLASSES, count)
    ahead, down = np.meshgrid(np.arange(SIDE), np.arange(SIDE))

    def around(grid: Any) -> Any:
        centre, radius = draw.uniform(6.5, 8.5, (count, 1, 1)), draw.uniform(5.5, 7, (count, 1, 1))
        return (grid - centre) / radius

    x, y = around(ahead), around(down)
    distance, far, near = x * x + y * y, np.maximum(abs(x), abs(y)), np.minimum(abs(x), abs(y))
    inside = np.select(
        [labels[:, None, None] // 2 == shape for shape in range(CLASSES // 2)],
        [distance < 1, (distance > 0.3) & (distance < 1), far < 0.85, (near < 0.3) & (far < 1), abs(x) + abs(y) < 1.1],
    )
    along = np.where(labels[:, None, None] % 2 == 0, x, y)
    stripes = np.sin(along * draw.uniform(6, 8, (count, 1, 1)) + draw.uniform(0, 6, (count, 1, 1)))
    stripe, ground = draw.uniform(0.3, 1, (2, count, 3, 1, 1))
    whole = inside[:, None] * (1 + stripes[:, None] * stripe) - ground
    whole = whole + NOISE * draw.standard_normal(whole.shape)
    return torch.from_numpy(whole.astype(np.float32)), torch.from_numpy(labels)


class _Block(nn.Module):
    """Two convolutions beside a shortcut (He et al., 2016)."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outside)
        self.second = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outside)
        self.shortcut = nn.Conv2d(inside, outside, 1, stride, bias=False) if inside != outside else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.first_norm(self.first(x)))
        return functional.relu(self.second_norm(self.second(y)) + self.shortcut(x))


class Images:
    """The task: 16 pictures a rank and step, SGD with momentum."""

    BATCH = 16
    TEST = 2000

    @staticmethod
    def model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, 1, 1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            _Block(16, 16, 1),
            _Block(16, 32, 2),
            _Block(32, 64, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, CLASSES),
        )

    @staticmethod
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def __init__(self, seed: int, rank: int) -> None:
        self._seed, self._rank = seed, rank

    def loss(self, model: nn.Module, step: int) -> torch.Tensor:
        inputs, labels = pictures(self.BATCH, [1, self._seed, self._rank, step])
        return functional.cross_entropy(model(inputs), labels)

    @torch.no_grad()
    def test(self, model: nn.Module) -> dict[str, float]:
        """Return loss and accuracy on pictures that no rank has seen."""
        inputs, labels = pictures(self.TEST, [2])
        model.eval()
        found = model(inputs)
        loss = functional.cross_entropy(found, labels)
        return {"loss": loss.item(), "accuracy": (found.argmax(1) == labels).float().mean().item()}
