"""Embedding tables divided among the data-parallel ranks; the layers around them stay data-parallel.

A recommender's tables are most of its weights, and a sample reads one row of each. So ranks send rows instead of
gradients of whole tables (Naumov et al. 2019, section 4). Each rank owns rows or tables. Forward: an all_to_all of row
numbers, and an all_to_all of the rows. Backward: an all_to_all of their gradients. A row has one owner, which updates
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional

from netfold.train.models.model import Model
from netfold.train.parallel.mesh import Mesh
from netfold.train.parallel.shards import local
from netfold.train.recipe import Recipe


class Embeddings(nn.Module):
    """One embedding table for each column: row numbers int64 [n, tables] -> f32 [n, tables, width].

    rows: of each table, at least 1. Initial weights are uniform within 1 / sqrt(rows), as in DLRM.
    `parallel.embeddings` divides every such module inside a model, but not a model that is itself one.
    """

    def __init__(self, rows: Sequence[int], width: int) -> None:
        super().__init__()
        self.rows, self.width = tuple(rows), width
        self.tables = nn.ModuleDict({str(number): nn.Embedding(count, width) for number, count in enumerate(rows)})
        for weight in _weights(self.tables).values():
            nn.init.uniform_(weight, -(len(weight) ** -0.5), len(weight) ** -0.5)

    def forward(self, asked: Tensor) -> Tensor:
        if asked.shape[1] != len(self.rows):
            raise ValueError(f"a sample needs rows of {asked.shape[1]} tables, but there are {len(self.rows)}")
        found = [functional.embedding(asked[:, number], weight) for number, weight in _weights(self.tables).items()]
        return torch.stack(found, 1)


def shard_embeddings(model: Model, recipe: Recipe, mesh: Mesh) -> None:
    """Replace every `Embeddings` in `model` by this rank's part, as `parallel.embeddings` says; no communication.

    With one data-parallel rank nothing changes. Raises ValueError if the recipe or the model does not allow it.
    """
    by_row = recipe.parallel.embeddings == "row_wise"
    paths = embeddings_to_shard(model, recipe)
    if mesh.data.size == 1:
        return
    for path in paths:
        whole = model.module.get_submodule(path)
        assert isinstance(whole, Embeddings)
        model.module.set_submodule(path, ShardedEmbeddings(whole, mesh, by_row=by_row))


def embeddings_to_shard(model: Model, recipe: Recipe) -> list[str]:
    """The paths of the modules that `parallel.embeddings` divides. Raises ValueError if there is none."""
    if recipe.parallel.embeddings == "replicated":
        return []
    paths = [path for path, module in model.module.named_modules() if isinstance(module, Embeddings)]
    if not paths:
        raise ValueError(
            f'parallel.embeddings = "{recipe.parallel.embeddings}": the model has no embedding tables (Embeddings); '
            'use embeddings = "replicated"'
        )
    return paths


def own_parameters(module: nn.Module) -> set[nn.Parameter]:
    """The parts of tables inside `module`, whose gradients are complete on their owner: nothing averages them."""
    parts = (part for part in module.modules() if isinstance(part, ShardedEmbeddings))
    return {parameter for part in parts for parameter in part.parameters()}


class ShardedEmbeddings(nn.Module):
    """This rank's part of `Embeddings`, with the same names.

    by_row: equal runs of every table's rows, in the order of ranks, as DTensor's Shard(0); the last may be shorter.
    Otherwise whole tables: the largest first, each to the rank with the fewest rows so far.
    Collective over the data axis; every rank must have equally many samples. Raises ValueError for a row number that a
    table does not have.
    """

    def __init__(self, whole: Embeddings, mesh: Mesh, *, by_row: bool) -> None:
        super().__init__()
        axis = mesh.data
        self.rows, self.width, self._axis, self._by_row = whole.rows, whole.width, axis, by_row
        # Of each table: the first of the ranks that hold it, and the rows that each of them holds.
        self._firsts = [0] * len(self.rows) if by_row else _balanced(self.rows, axis.size)
        self._runs = [-(-rows // axis.size) for rows in self.rows] if by_row else list(self.rows)
        # An empty tensor in the module's dtype and on its device, for a rank without tables.
        self.register_buffer("nothing", next(whole.parameters()).detach().new_empty(0, self.width), persistent=False)
        self.tables = nn.ModuleDict()
        for number, weight in _weights(whole.tables).items():
            table = cast(nn.Embedding, whole.tables[str(number)])
            if by_row:
                # A rank without rows has an empty parameter: a DTensor must exist on every rank of its mesh.
                rows = distribute_tensor(weight, mesh.data_mesh, [Shard(0)], src_data_rank=None)
                table.weight = nn.Parameter(rows)
                table.num_embeddings = len(rows.to_local())
            if by_row or self._firsts[number] == axis.rank:
                self.tables[str(number)] = table

    def forward(self, asked: Tensor) -> Tensor:
        """int64 [n, tables] -> [n, tables, width], as `Embeddings`."""
        wrong = ((asked < 0) | (asked >= asked.new_tensor(self.rows))).nonzero()
        if len(wrong):
            sample, number = wrong[0].tolist()
            raise ValueError(
                f"data-parallel rank {self._axis.rank}: sample {sample} of its batch reads row "
                f"{int(asked[sample, number])} of table {number}, which has {self.rows[number]} rows"
            )
        ranks, tables = self._axis.size, len(self.rows)
        runs = asked.new_tensor(self._runs)
        owners, rows = asked.new_tensor(self._firsts) + asked // runs, asked % runs
        # Sorted by owner, then by table: so the numbers of rows identify the tables.
        places = (owners * tables + torch.arange(tables, device=asked.device)).flatten()
        order = places.argsort(stable=True)
        leaving = places.bincount(minlength=ranks * tables).view(ranks, tables)
        arriving = self._arriving(leaving)
        out, back = leaving.sum(1).tolist(), arriving.sum(1).tolist()
        found = self._look_up(all_to_all_single(rows.flatten()[order], back, out, self._axis.group), arriving)
        if found.requires_grad:
            # Each rank's loss is the mean over its share. Owners add up the gradients, which must become their mean.
            found.register_hook(lambda gradient: gradient / ranks)  # type: ignore[no-untyped-call]
        answers = all_to_all_single(found, out, back, self._axis.group)
        return answers[order.argsort()].view(*asked.shape, self.width)

    def _arriving(self, leaving: Tensor) -> Tensor:
        """Rows that this rank requests of each rank -> rows that each rank requests of this one; [ranks, tables]."""
        if self._by_row:
            return all_to_all_single(leaving, None, None, self._axis.group).view_as(leaving)
        # Every rank has equally many samples, and each sample reads one row of every table: nothing to exchange.
        owned = leaving.new_tensor([first == self._axis.rank for first in self._firsts])
        return owned * leaving.sum(0).expand_as(leaving)

    def _look_up(self, rows: Tensor, arriving: Tensor) -> Tensor:
        """rows: indices in this rank's tables, sorted by requesting rank, then by table -> [rows, width]."""
        ranks, tables = arriving.shape
        numbers = torch.arange(tables, device=rows.device).repeat(ranks).repeat_interleave(arriving.flatten())
        order = numbers.argsort(stable=True)
        asked = torch.split(rows[order], arriving.sum(0).tolist())
        found = [functional.embedding(asked[number], weight) for number, weight in _weights(self.tables).items()]
        # A rank without tables must take part in the exchange of gradients too.
        nothing = self.get_buffer("nothing").detach().requires_grad_(torch.is_grad_enabled())
        return torch.cat([nothing, *found])[order.argsort()]


def _weights(tables: nn.ModuleDict) -> dict[int, Tensor]:
    """The weights by the number of their table, or this rank's rows of them."""
    return {int(number): local(cast(nn.Embedding, table).weight) for number, table in tables.items()}


def _balanced(sizes: Sequence[int], bins: int) -> list[int]:
    """A bin for each size: the largest size first, each to the bin with the smallest sum so far."""
    load, chosen = [0] * bins, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        chosen[index] = load.index(min(load))
        load[chosen[index]] += sizes[index]
    return chosen
