"""Embedding tables, which can be divided among the data-parallel ranks.

A recommender's tables are most of its weights, and a sample reads one row of each. So ranks send rows instead of
gradients of whole tables (Naumov et al. 2019, section 4). Each rank owns rows or tables. Forward: an all_to_all of row
numbers, and an all_to_all of the rows. Backward: an all_to_all of their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional

from netfold_train.parallel.mesh import Mesh
from netfold_train.parallel.owned import Owned
from netfold_train.parallel.shards import local


class Embeddings(Owned):
    """One embedding table for each column: row numbers int64 [n, tables] -> f32 [n, tables, width].

    rows: of each table, at least 1. Initial weights are uniform within 1 / sqrt(rows), as in DLRM. Divided:
    row_wise: equal runs of every table's rows, in the order of ranks, as DTensor's Shard(0); the last may be shorter.
    table_wise: whole tables, the largest first, each to the rank with the fewest rows so far.
    Every rank must then have equally many samples. Raises ValueError for a row number that a table does not have.
    """

    key = "embeddings"

    def __init__(self, rows: Sequence[int], width: int) -> None:
        super().__init__()
        self.rows, self.width = tuple(rows), width
        self.tables = nn.ModuleDict({str(number): nn.Embedding(count, width) for number, count in enumerate(rows)})
        for weight in self._weights().values():
            nn.init.uniform_(weight, -(len(weight) ** -0.5), len(weight) ** -0.5)

    def divide(self, mesh: Mesh, how: str) -> None:
        axis, count = mesh.data, len(self.rows)
        self._by_row = how == "row_wise"
        # Of each table: the first of the ranks that hold it, the rows that each of them holds, and, among the places of
        # an exchange, the table's on that first rank.
        self._firsts = [0] * count if self._by_row else _balanced(self.rows, axis.size)
        self._runs = [-(-rows // axis.size) for rows in self.rows] if self._by_row else list(self.rows)
        sorted_tables = sorted(range(count), key=self._firsts.__getitem__)
        self._places = [sorted_tables.index(number) for number in range(count)]
        self._held = [count if self._by_row else self._firsts.count(rank) for rank in range(axis.size)]
        # An empty tensor in the module's dtype and on its device, for a rank without tables.
        self.register_buffer("nothing", next(self.parameters()).detach().new_empty(0, self.width), persistent=False)
        for number in range(count):
            table = cast(nn.Embedding, self.tables[str(number)])
            if self._by_row:
                # A rank without rows has an empty parameter: a DTensor must exist on every rank of its mesh.
                rows = distribute_tensor(table.weight, mesh.data_mesh, [Shard(0)], src_data_rank=None)
                table.weight = nn.Parameter(rows)
                table.num_embeddings = len(rows.to_local())
            elif self._firsts[number] != axis.rank:
                del self.tables[str(number)]

    def forward(self, asked: Tensor) -> Tensor:
        if asked.shape[1] != len(self.rows):
            raise ValueError(f"a sample needs rows of {asked.shape[1]} tables, but there are {len(self.rows)}")
        if self.axis is None:
            found = [functional.embedding(asked[:, number], weight) for number, weight in self._weights().items()]
            return torch.stack(found, 1)
        wrong = ((asked < 0) | (asked >= asked.new_tensor(self.rows))).nonzero()
        if len(wrong):
            sample, number = wrong[0].tolist()
            raise ValueError(
                f"data-parallel rank {self.axis.rank}: sample {sample} of its batch reads row "
                f"{int(asked[sample, number])} of table {number}, which has {self.rows[number]} rows"
            )
        runs, places, arriving = asked.new_tensor(self._runs), asked.new_tensor(self._places), None
        if self._by_row:
            places = places + asked // runs * len(self.rows)
        else:
            # Every rank has equally many samples, and each sample reads one row of every table.
            arriving = asked.new_full((self.axis.size, self._held[self.axis.rank]), len(asked))
        everywhere = places.expand_as(asked).flatten()
        rows = self.exchange((asked % runs).flatten(), everywhere, self._held, self._look_up, arriving)
        return rows.view(*asked.shape, self.width)

    def _look_up(self, rows: Tensor, counts: list[int]) -> Tensor:
        """rows: numbers in this rank's tables, sorted by table -> [rows, width]."""
        # A rank without tables must take part in the exchange of gradients too.
        nothing = self.get_buffer("nothing").detach().requires_grad_(torch.is_grad_enabled())
        parts = zip(torch.split(rows, counts), self._weights().values(), strict=True)
        return torch.cat([nothing, *(functional.embedding(part, weight) for part, weight in parts)])

    def _weights(self) -> dict[int, Tensor]:
        """The weights by the number of their table, or this rank's rows of them."""
        return {int(number): local(cast(nn.Embedding, table).weight) for number, table in self.tables.items()}


def _balanced(sizes: Sequence[int], bins: int) -> list[int]:
    """A bin for each size: the largest size first, each to the bin with the smallest sum so far."""
    load, chosen = [0] * bins, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        chosen[index] = load.index(min(load))
        load[chosen[index]] += sizes[index]
    return chosen
