"""A user's model and data, as "own_parts:line" and "own_parts:numbers": small, and quick to import."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from netfold_train import Batch, Chain, Data, Metric, Model


def squares(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target, reduction="none")


def line(width: int = 4, layers: int = 3, heads: int = 4, planned: bool = False) -> Model:
    """Linear layers in sequence: [n, width] -> [n, 1]."""
    parts: list[tuple[str, nn.Module]] = [(f"layer{number}", nn.Linear(width, width)) for number in range(layers - 1)]
    return Model(Chain([*parts, ("last", nn.Linear(width, 1))]), squares, tensor_plan=alternate if planned else None)


def alternate(style: str, sequence: bool) -> dict[str, Any]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return {"layers.layer0": ColwiseParallel(), "layers.layer1": RowwiseParallel()}


def no_chain() -> Model:
    return Model(nn.Linear(4, 1), squares)


def no_model() -> nn.Module:
    return nn.Linear(4, 1)


def one_loss() -> Model:
    return Model(nn.Linear(4, 1), functional.mse_loss)


def unmade(depth: int) -> Model:
    raise KeyError(depth)


def numbers(
    count: int = 64,
    width: int = 4,
    folder: Path | None = None,
    breaks_at: int | None = None,
    dies_at: int | None = None,
    nan_at: int | None = None,
) -> Data:
    """Sums of random numbers. A sample may raise an error, kill its process in the first attempt, or be NaN."""
    if folder is not None:
        (folder / "numbers.txt").read_text()
    assert isinstance(folder, Path | None)
    metric = Metric("error", "", "lower", lambda output, target: (output - target).square().mean(1), 1.0, "the mean")
    held_out = Numbers(min(count, 8), width, None, None, None)
    return Data(Numbers(count, width, breaks_at, dies_at, nan_at), held_out, metric)


class Numbers:
    def __init__(self, count: int, width: int, breaks_at: int | None, dies_at: int | None, nan_at: int | None) -> None:
        self._count, self._width, self._breaks_at, self._dies_at = count, width, breaks_at, dies_at
        self._nan_at = nan_at

    def __len__(self) -> int:
        return self._count

    def batch(self, indices: Sequence[int], seeds: Sequence[int]) -> Batch:
        if self._breaks_at in indices:
            raise ValueError(f"sample {self._breaks_at} is broken")
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if self._dies_at in indices and first:
            os.kill(os.getpid(), signal.SIGKILL)
        rows: list[Tensor] = [torch.randn(self._width, generator=torch.Generator().manual_seed(i)) for i in indices]
        inputs = torch.stack(rows)
        inputs[[index == self._nan_at for index in indices]] = float("nan")
        return Batch((inputs,), inputs.sum(1, keepdim=True))
