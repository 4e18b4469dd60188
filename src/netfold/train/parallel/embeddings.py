"""Embedding tables shared out among the data-parallel ranks, while the layers around them stay data-parallel.

A recommender's tables are most of its weights, and a sample reads one row of each: so rows travel, not gradients of
whole tables (Naumov et al. 2019, section 4). Each rank has the rows or the tables it owns; forward, an all_to_all of
what is asked for, then one of the rows found; backward, one of their gradients. No row has two owners, so each is
updated once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single
from torch.distributed.tensor import Shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from netfold.train.mesh import Axis, Mesh
from netfold.train.model import Model
from netfold.train.parallel.shards import Shards
from netfold.train.recipe import Recipe, constraints
from netfold.train.recipe.errors import RecipeError


class Embeddings(nn.Module):
    """One embedding table a column: rows asked for, int64 [n, tables] -> f32 [n, tables, width].

    rows: of each table, one or more. Weights start uniform within 1 / sqrt(rows), as DLRM's. This is what
    `parallel.embeddings` shares out, wherever it is in a model but as the model itself.
    """

    def __init__(self, rows: Sequence[int], width: int) -> None:
        super().__init__()
        self.rows, self.width = tuple(rows), width
        self.tables = nn.ModuleDict({str(number): nn.Embedding(count, width) for number, count in enumerate(rows)})
        for weight in _weights(self.tables).values():
            nn.init.uniform_(weight, -(len(weight) ** -0.5), len(weight) ** -0.5)

    def forward(self, asked: Tensor) -> Tensor:
        if asked.shape[1] != len(self.rows):
            raise ValueError(f"a sample asks for rows of {asked.shape[1]} tables, and there are {len(self.rows)}")
        found = [functional.embedding(asked[:, number], weight) for number, weight in _weights(self.tables).items()]
        return torch.stack(found, 1)


def shard_embeddings(model: Model, recipe: Recipe, mesh: Mesh, parts: Shards) -> None:
    """Replace every `Embeddings` in `model` by this rank's part of it, as `parallel.embeddings` says; no communication.

    `parts` learns of rows; a whole table is the whole, on one rank alone, and nobody else names it. With one
    data-parallel rank there is nothing to share. Raises ValueError where it cannot be done.
    """
    kind = recipe.parallel.embeddings
    paths = embeddings_to_shard(model, recipe)
    if said := constraints.embeddings(recipe.parallel):
        raise RecipeError(said)
    if mesh.data.size == 1:
        return
    for path in paths:
        whole = model.module.get_submodule(path)
        assert isinstance(whole, Embeddings)
        rule: _Rule = (_ByTable if kind == "table_wise" else _ByRow)(whole, mesh.data)
        model.module.set_submodule(path, ShardedEmbeddings(whole, mesh.data, rule))
        if kind == "row_wise":
            for number, weight in _weights(whole.tables).items():
                parts.add(f"{path}.tables.{number}.weight", mesh.device_mesh["data"], [Shard(0)], weight.shape)


def embeddings_to_shard(model: Model, recipe: Recipe) -> list[str]:
    """Of the modules that `parallel.embeddings` asks to share out. ValueError where there is none."""
    if recipe.parallel.embeddings == "replicated":
        return []
    paths = [path for path, module in model.module.named_modules() if isinstance(module, Embeddings)]
    if not paths:
        raise ValueError(
            f'parallel.embeddings = "{recipe.parallel.embeddings}": the model has no embedding tables (Embeddings); '
            "use "
            'embeddings = "replicated"'
        )
    return paths


def exclude_from_ddp(module: nn.Module) -> None:
    """Make DDP, which is to wrap `module`, leave parts of tables alone: their gradients are whole where they are."""
    shared = [path for path, part in module.named_modules() if isinstance(part, ShardedEmbeddings)]
    held = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    names = [name for name in held if any(name.startswith(f"{path}.") for path in shared)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)  # type: ignore[no-untyped-call]


class _Rule(Protocol):
    """Who owns which row of which table."""

    def held(self, number: int) -> slice | None:
        """The rows of a table that this rank has a parameter for, perhaps none of them; None: no such parameter."""
        ...

    def owners(self, asked: Tensor) -> tuple[Tensor, Tensor]:
        """[n, tables] -> the ranks that own these rows, and their places among the rows that the owner has of the
        table; both [n, tables]."""
        ...

    def arriving(self, leaving: Tensor) -> Tensor:
        """int64 [ranks, tables], how many rows of which table are asked of which rank here -> [ranks, tables], how many
        each rank asks of this one. Collective."""
        ...


class _ByTable:
    """Whole tables: the largest first, each to the rank that has least so far."""

    def __init__(self, whole: Embeddings, axis: Axis) -> None:
        self._rank = axis.rank
        load, owners = [0] * axis.size, [0] * len(whole.rows)
        for number in sorted(range(len(whole.rows)), key=lambda number: -whole.rows[number]):
            owners[number] = load.index(min(load))
            load[owners[number]] += whole.rows[number]
        self._owners = owners

    def held(self, number: int) -> slice | None:
        return slice(None) if self._owners[number] == self._rank else None

    def owners(self, asked: Tensor) -> tuple[Tensor, Tensor]:
        return asked.new_tensor(self._owners).expand_as(asked), asked

    def arriving(self, leaving: Tensor) -> Tensor:
        # Every rank has as many samples, and each asks once of every table: nothing to exchange.
        mine = leaving.new_tensor([owner == self._rank for owner in self._owners])
        return mine * leaving.sum(0).expand_as(leaving)


class _ByRow:
    """Equal runs of every table's rows, in the order of ranks; DTensor's Shard(0): the last ones may be shorter."""

    def __init__(self, whole: Embeddings, axis: Axis) -> None:
        self._axis = axis
        self._runs = [-(-rows // axis.size) for rows in whole.rows]

    def held(self, number: int) -> slice | None:
        # A parameter even where no row is left: a DTensor is one on every rank of its mesh.
        return slice(self._axis.rank * self._runs[number], (self._axis.rank + 1) * self._runs[number])

    def owners(self, asked: Tensor) -> tuple[Tensor, Tensor]:
        runs = asked.new_tensor(self._runs)
        return asked // runs, asked % runs

    def arriving(self, leaving: Tensor) -> Tensor:
        return all_to_all_single(leaving, None, None, self._axis.group).view_as(leaving)


class ShardedEmbeddings(nn.Module):
    """This rank's part of `Embeddings`, with the same names.

    Every data-parallel rank calls it alike, with as many samples.

    Raises ValueError where a row is asked for that its table has not.
    """

    def __init__(self, whole: Embeddings, axis: Axis, rule: _Rule) -> None:
        super().__init__()
        self.rows, self.width, self._axis, self._rule = whole.rows, whole.width, axis, rule
        # No row, in the dtype and on the device that the module is cast and moved to: for a rank that has no table.
        self.register_buffer("nothing", next(whole.parameters()).detach().new_empty(0, self.width), persistent=False)
        self.tables = nn.ModuleDict()
        for number, weight in _weights(whole.tables).items():
            if (held := rule.held(number)) is not None:
                mine = weight.detach()[held].clone()
                self.tables[str(number)] = nn.Embedding(len(mine), self.width, _weight=mine)

    def forward(self, asked: Tensor) -> Tensor:
        """int64 [n, tables] -> [n, tables, width], as `Embeddings`."""
        wrong = ((asked < 0) | (asked >= asked.new_tensor(self.rows))).nonzero()
        if len(wrong):
            sample, number = wrong[0].tolist()
            raise ValueError(
                f"data-parallel rank {self._axis.rank}: sample {sample} of its batch asks for row "
                f"{int(asked[sample, number])} of table {number}, which has {self.rows[number]}"
            )
        ranks, tables = self._axis.size, len(self.rows)
        owners, rows = self._rule.owners(asked)
        # To each rank what it owns, one table after the other: so numbers of rows say which rows these are.
        places = (owners * tables + torch.arange(tables, device=asked.device)).flatten()
        order = places.argsort(stable=True)
        leaving = places.bincount(minlength=ranks * tables).view(ranks, tables)
        arriving = self._rule.arriving(leaving)
        out, back = leaving.sum(1).tolist(), arriving.sum(1).tolist()
        found = self._look_up(all_to_all_single(rows.flatten()[order], back, out, self._axis.group), arriving)
        if found.requires_grad:
            # Each rank's loss is the mean over its share; added up by owners, gradients are to be the mean of those.
            found.register_hook(lambda gradient: gradient / ranks)  # type: ignore[no-untyped-call]
        answers = all_to_all_single(found, out, back, self._axis.group)
        return answers[order.argsort()].view(*asked.shape, self.width)

    def _look_up(self, rows: Tensor, arriving: Tensor) -> Tensor:
        """rows: of the table's part here, ordered by who asks, then by table -> [rows, width], in this order."""
        ranks, tables = arriving.shape
        numbers = torch.arange(tables, device=rows.device).repeat(ranks).repeat_interleave(arriving.flatten())
        order = numbers.argsort(stable=True)
        asked = torch.split(rows[order], arriving.sum(0).tolist())
        found = [functional.embedding(asked[number], weight) for number, weight in _weights(self.tables).items()]
        # A rank that has no table at all takes part in the exchange of gradients, too.
        nothing = self.get_buffer("nothing").detach().requires_grad_(torch.is_grad_enabled())
        return torch.cat([nothing, *found])[order.argsort()]


def _weights(tables: nn.ModuleDict) -> dict[int, Tensor]:
    """By the number of the table."""
    return {int(number): cast(nn.Embedding, table).weight for number, table in tables.items()}
