"""A recommender after DLRM (Naumov et al. 2019): numbers and categories of a sample -> the logit of the target 1.

An MLP turns the numbers into a vector, and each category reads a row of its table. The dot products of all pairs of
these vectors, and the numbers' vector, are the input of a second MLP.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from netfold.train.model import Chain, Model, Style
from netfold.train.models.linear import Dense, stack_plan
from netfold.train.parallel.embeddings import Embeddings


def dlrm(
    numbers: int, rows: Sequence[int], width: int = 16, bottom: Sequence[int] = (64,), top: Sequence[int] = (64,)
) -> Model:
    """(f32 [n, numbers], int64 [n, tables]) -> f32 [n]; targets 0 or 1, f32 [n]; the loss is the cross entropy in nats.

    numbers: per sample. rows: of each category's table. width: of a row. bottom, top: widths of hidden layers.
    """
    vectors = 1 + len(rows)
    widths = [width + vectors * (vectors - 1) // 2, *top]
    layers: list[tuple[str, nn.Module]] = [
        ("features", Features([numbers, *bottom, width], Embeddings(rows, width))),
        ("interaction", Interaction()),
        *((f"top{number}", Dense(*widths[number : number + 2])) for number in range(len(top))),
        ("logit", Logit(widths[-1])),
    ]

    def plan(style: Style, sequence: bool) -> Mapping[str, Any]:
        if sequence:
            raise ValueError("parallel.sequence: a recommender's samples have no sequence; use sequence = false")
        # The logit's layer has one output, and stays whole.
        return stack_plan([f"layers.features.bottom.{number}.linear" for number in range(len(bottom) + 1)], style) | (
            stack_plan([f"layers.top{number}.linear" for number in range(len(top))], style)
        )

    return Model(Chain(layers), functional.binary_cross_entropy_with_logits, plan)


class Features(nn.Module):
    """([n, numbers], [n, tables]) -> [n, 1 + tables, width]: the numbers' vector, then each table's."""

    def __init__(self, widths: Sequence[int], tables: Embeddings) -> None:
        super().__init__()
        self.bottom = nn.Sequential(*(Dense(*pair) for pair in itertools.pairwise(widths)))
        self.tables = tables

    def forward(self, numbers: Tensor, asked: Tensor) -> Tensor:
        return torch.cat([self.bottom(numbers).unsqueeze(1), self.tables(asked)], 1)


class Interaction(nn.Module):
    """[n, vectors, width] -> [n, width + pairs]: the first vector, and the dot product of each pair."""

    def forward(self, vectors: Tensor) -> Tensor:
        count = vectors.shape[1]
        first, second = torch.tril_indices(count, count, -1, device=vectors.device)
        return torch.cat([vectors[:, 0], (vectors @ vectors.mT)[:, first, second]], 1)


class Logit(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        logit: Tensor = self.linear(x).squeeze(-1)
        return logit
