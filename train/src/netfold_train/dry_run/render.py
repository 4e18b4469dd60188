"""Print a recipe's plan."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from netfold.console import plain_console
from netfold_train.dry_run.explain import Plan
from netfold_train.dry_run.traffic import Traffic

_SPLIT = ("ranks", "pipeline", "data", "tensor", "stages", "batch", "accumulate", "microbatches", "samples")
_AXES = ("tensor", "pipeline", "data", "all")


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Print the mesh, each rank's layers and memory, and the messages of a step."""
    console = console or plain_console()
    split, recipe = plan.split, plan.recipe
    batch = [f"batch {split.batch} = {split.data} data-parallel x {split.batch // split.data} samples"]
    if split.accumulate > 1:
        batch.append(f"in {split.accumulate} parts")
    if split.pipeline > 1:
        batch.append(f"in {split.microbatches} microbatches of {split.samples} ({recipe.parallel.schedule})")
    lines = [
        f"{recipe.model.name}, {plan.parameters:,} parameters, on {recipe.data.name}; {recipe.training.precision}, "
        f"{recipe.optimizer.name}, {plan.steps} steps over {recipe.run.backend}",
        f"{split.ranks} {'rank' if split.ranks == 1 else 'ranks'} = pipeline {split.pipeline} x data {split.data} x "
        f"tensor {split.tensor}; {', '.join(batch)}",
    ]
    if split.ranks > 1:
        lines.append(f"rank = (index in pipeline x {split.data} + index in data) x {split.tensor} + index in tensor")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    console.print(_places(plan))
    if split.ranks > 1:
        console.print(_traffic(plan))
    for note in plan.notes:
        console.print(note, highlight=False, soft_wrap=True)


def as_object(plan: Plan) -> dict[str, Any]:
    """The plan for JSON; bytes and activations that are not known are null."""
    places = [asdict(place) for place in plan.places]
    for place, each in zip(places, plan.places, strict=True):
        place["memory"]["total"] = each.memory.total
        if plan.unknown:
            place["memory"]["activations"] = None
    recipe = json.loads(plan.recipe.model_dump_json())
    split = {name: getattr(plan.split, name) for name in _SPLIT}
    return {"recipe": recipe, "split": split, "steps": plan.steps, "parameters": plan.parameters} | {
        "places": places,
        "notes": list(plan.notes),
    }


def _places(plan: Plan) -> Table:
    rows = []
    for place in plan.places:
        memory = place.memory
        layers = "; ".join(stage[0] if len(stage) == 1 else f"{stage[0]} .. {stage[-1]}" for stage in place.stages)
        parts = (memory.weights, memory.gradients, memory.optimizer, memory.activations, memory.total)
        *sizes, activations, total = (decimal(round(each)) for each in parts)
        if plan.unknown:
            activations, total = "?", f"{total} + ?"
        rows.append([_runs(place.ranks), layers, f"{place.parameters:,}", *sizes, activations, total])
    layers = "layers" if plan.split.stages == plan.split.pipeline else "layers of each stage"
    numbers = ["parameters", "weights", "gradients", "optimizer", "activations", "total"]
    return _table("layers and memory of each rank", ["ranks", layers], numbers, rows)


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
            "?" if plan.unknown and each.axis == "pipeline" else decimal(each.bytes),
        ]
        for each, ranks in sorted(ranks_of.items(), key=lambda row: (_AXES.index(row[0].axis), row[0].of, row[1]))
    ]
    words, numbers = ["axis", "operation", "of", "ranks"], ["among", "calls", "bytes"]
    return _table("messages of a rank in a step", words, numbers, rows)


def _table(title: str, words: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table whose first columns are words, aligned left, and whose last are numbers, aligned right."""
    table = Table(title=title, title_justify="left")
    for name in (*words, *numbers):
        table.add_column(name, justify="left" if name in words else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _runs(ranks: Sequence[int]) -> str:
    """ "0-3, 8": consecutive ranks as a range."""
    numbered = enumerate(sorted(ranks))
    runs = [[rank for _, rank in run] for _, run in groupby(numbered, key=lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
