"""A plan on the screen."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from netfold.train.explain import Plan, rank_at, size
from netfold.train.explain.traffic import Traffic

COLUMNS = 6
_AXES = ("tensor", "pipeline", "data", "all")


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Print it: the mesh, what each rank holds and needs, what travels in a step."""
    console = console or Console()
    split, recipe = plan.split, plan.recipe
    cut = [f"batch {split.batch} = {split.data} data-parallel x {split.batch // split.data} samples"]
    cut += [f"in {split.accumulate} parts"] if split.accumulate > 1 else []
    cut += [f"in {split.microbatches} microbatches of {split.samples} ({recipe.parallel.schedule})"] * (
        split.pipeline > 1
    )
    lines = [
        f"{recipe.model.name}, {plan.parameters:,} parameters, on {recipe.data.name}; {recipe.training.precision}, "
        f"{recipe.optimizer.name}, {plan.steps} steps over {recipe.run.backend}",
        f"{split.ranks} {'rank' if split.ranks == 1 else 'ranks'} = pipeline {split.pipeline} x data {split.data} x "
        f"tensor {split.tensor}; {', '.join(cut)}",
    ]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    for table in (_mesh(plan), _holds(plan), _needs(plan)):
        console.print(table)
    if split.ranks > 1:
        console.print(_travels(plan))
    for note in plan.notes:
        console.print(note, highlight=False, soft_wrap=True)


def _mesh(plan: Plan) -> Table:
    split = plan.split
    table = Table(title="which rank is where", title_justify="left")
    table.add_column("pipeline")
    # As many columns as a screen has room for; else all of a row in one.
    columns = [[data] for data in range(split.data)] if split.data <= COLUMNS else [list(range(split.data))]
    for column in columns:
        table.add_column(f"data {_runs(column)}", justify="right")
    for pipeline in range(split.pipeline):
        cells = [
            _runs([rank_at(split, pipeline, data, tensor) for data in column for tensor in range(split.tensor)])
            for column in columns
        ]
        table.add_row(str(pipeline), *cells)
    return table


def _holds(plan: Plan) -> Table:
    table = Table(title="what a rank holds", title_justify="left")
    table.add_column("ranks")
    table.add_column("layers" if plan.split.stages == plan.split.pipeline else "layers of each stage")
    table.add_column("parameters", justify="right")
    for place in plan.places:
        table.add_row(_runs(place.ranks), "; ".join(_names(stage) for stage in place.stages), f"{place.parameters:,}")
    return table


def _needs(plan: Plan) -> Table:
    table = Table(title="memory that a rank needs", title_justify="left")
    table.add_column("ranks")
    for name in ("weights", "gradients", "optimizer", "activations", "together"):
        table.add_column(name, justify="right")
    for place in plan.places:
        memory = place.memory
        parts = (memory.weights, memory.gradients, memory.state, memory.activations)
        cells = ["?" if each is None else size(each) for each in parts]
        together = size(memory.total) + (" + ?" if memory.activations is None else "")
        table.add_row(_runs(place.ranks), *cells, together)
    return table


def _travels(plan: Plan) -> Table:
    table = Table(title="what travels in a step, of each rank", title_justify="left")
    for name in ("axis", "operation", "of"):
        table.add_column(name)
    table.add_column("ranks")
    for name in ("among", "calls", "bytes"):
        table.add_column(name, justify="right")
    # Places that do the same share a line.
    rows: dict[Traffic, list[int]] = {}
    for place in plan.places:
        for each in place.traffic:
            rows.setdefault(each, []).extend(place.ranks)
    for each, ranks in sorted(rows.items(), key=lambda row: (_AXES.index(row[0].axis), row[0].of, row[1])):
        table.add_row(
            each.axis,
            each.operation,
            each.of + (f", every {each.every} steps" if each.every > 1 else ""),
            _runs(ranks),
            str(each.ranks),
            str(each.calls),
            "?" if plan.unknown and each.axis == "pipeline" else size(each.bytes),
        )
    return table


def _runs(ranks: Sequence[int]) -> str:
    """0-3, 8: neighbours together."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and found[-1][-1] + 1 == rank:
            found[-1].append(rank)
        else:
            found.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found)


def _names(layers: Sequence[str]) -> str:
    return layers[0] if len(layers) == 1 else f"{layers[0]} .. {layers[-1]}"
