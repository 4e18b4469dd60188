"""A recommender after DLRM (Naumov et al. 2019): numbers and categories of a sample -> the logit of the target 1.

An MLP turns the numbers into a vector, and each category reads a row of its table. The dot products of all pairs of
these vectors, and the numbers' vector, are the input of a second MLP.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from netfold_train.models.model import Chain, Model
from netfold_train.parallel.embeddings import Embeddings
from netfold_train.zoo.models.linear import dense, named, stacks_plan


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
        *((f"top{number}", dense(*pair)) for number, pair in enumerate(itertools.pairwise(widths))),
        ("logit", named(linear=nn.Linear(widths[-1], 1), flatten=nn.Flatten(0))),
    ]
    # The logit's layer has one output, and stays whole.
    plan = stacks_plan(
        [f"layers.features.bottom.{number}.linear" for number in range(len(bottom) + 1)],
        [f"layers.top{number}.linear" for number in range(len(top))],
    )
    return Model(Chain(layers), _loss, tensor_plan=plan)


def _loss(logits: Tensor, target: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logits, target, reduction="none")


class Features(nn.Module):
    """([n, numbers], [n, tables]) -> [n, 1 + tables, width]: the numbers' vector, then each table's."""

    def __init__(self, widths: Sequence[int], tables: Embeddings) -> None:
        super().__init__()
        self.bottom = nn.Sequential(*(dense(*pair) for pair in itertools.pairwise(widths)))
        self.tables = tables

    def forward(self, numbers: Tensor, asked: Tensor) -> Tensor:
        return torch.cat([self.bottom(numbers).unsqueeze(1), self.tables(asked)], 1)


class Interaction(nn.Module):
    """[n, vectors, width] -> [n, width + pairs]: the first vector, and the dot product of each pair."""

    def forward(self, vectors: Tensor) -> Tensor:
        count = vectors.shape[1]
        first, second = torch.tril_indices(count, count, -1, device=vectors.device)
        return torch.cat([vectors[:, 0], (vectors @ vectors.mT)[:, first, second]], 1)
