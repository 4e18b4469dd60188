"""Print a recipe's plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from netfold.train.explain import Plan, rank_at, size
from netfold.train.explain.traffic import Traffic

COLUMNS = 6
_AXES = ("tensor", "pipeline", "data", "all")


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Print the mesh, each rank's layers and memory, and the messages of a step."""
    console = console or Console()
    split, recipe = plan.split, plan.recipe
    cut = [f"batch {split.batch} = {split.data} data-parallel x {split.batch // split.data} samples"]
    cut += [f"in {split.accumulate} parts"] if split.accumulate > 1 else []
    if split.pipeline > 1:
        cut.append(f"in {split.microbatches} microbatches of {split.samples} ({recipe.parallel.schedule})")
    lines = [
        f"{recipe.model.name}, {plan.parameters:,} parameters, on {recipe.data.name}; {recipe.training.precision}, "
        f"{recipe.optimizer.name}, {plan.steps} steps over {recipe.run.backend}",
        f"{split.ranks} {'rank' if split.ranks == 1 else 'ranks'} = pipeline {split.pipeline} x data {split.data} x "
        f"tensor {split.tensor}; {', '.join(cut)}",
    ]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    for table in (_mesh(plan), _layers(plan), _memory(plan), *([_traffic(plan)] if split.ranks > 1 else [])):
        console.print(table)
    for note in plan.notes:
        console.print(note, highlight=False, soft_wrap=True)


def _mesh(plan: Plan) -> Table:
    split = plan.split
    # One column for each data-parallel rank if they fit on a screen, else one for all.
    columns = [[data] for data in range(split.data)] if split.data <= COLUMNS else [list(range(split.data))]
    rows = [
        [
            str(pipeline),
            *(
                _runs([rank_at(split, pipeline, data, tensor) for data in column for tensor in range(split.tensor)])
                for column in columns
            ),
        ]
        for pipeline in range(split.pipeline)
    ]
    return _table("which rank is where", ["pipeline"], [f"data {_runs(column)}" for column in columns], rows)


def _layers(plan: Plan) -> Table:
    layers = "layers" if plan.split.stages == plan.split.pipeline else "layers of each stage"
    rows = [
        [_runs(place.ranks), "; ".join(_names(stage) for stage in place.stages), f"{place.parameters:,}"]
        for place in plan.places
    ]
    return _table("layers of each rank", ["ranks", layers], ["parameters"], rows)


def _memory(plan: Plan) -> Table:
    rows = []
    for place in plan.places:
        memory = place.memory
        parts = (memory.weights, memory.gradients, memory.state, memory.activations)
        total = size(memory.total) + (" + ?" if memory.activations is None else "")
        rows.append([_runs(place.ranks), *("?" if each is None else size(each) for each in parts), total])
    return _table("memory of a rank", ["ranks"], ["weights", "gradients", "optimizer", "activations", "total"], rows)


def _traffic(plan: Plan) -> Table:
    # Places with the same traffic share a row.
    ranks_of: dict[Traffic, list[int]] = {}
    for place in plan.places:
        for each in place.traffic:
            ranks_of.setdefault(each, []).extend(place.ranks)
    rows = [
        [
            each.axis,
            each.operation,
            each.of + (f", every {each.every} steps" if each.every > 1 else ""),
            _runs(ranks),
            str(each.ranks),
            str(each.calls),
            "?" if plan.unknown and each.axis == "pipeline" else size(each.bytes),
        ]
        for each, ranks in sorted(ranks_of.items(), key=lambda row: (_AXES.index(row[0].axis), row[0].of, row[1]))
    ]
    return _table(
        "messages of a rank in a step", ["axis", "operation", "of", "ranks"], ["among", "calls", "bytes"], rows
    )


def _table(title: str, words: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table whose first columns are words, aligned left, and whose last are numbers, aligned right."""
    table = Table(title=title, title_justify="left")
    for name in words:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _runs(ranks: Sequence[int]) -> str:
    """ "0-3, 8": consecutive ranks as a range."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and found[-1][-1] + 1 == rank:
            found[-1].append(rank)
        else:
            found.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found)


def _names(layers: Sequence[str]) -> str:
    return layers[0] if len(layers) == 1 else f"{layers[0]} .. {layers[-1]}"
