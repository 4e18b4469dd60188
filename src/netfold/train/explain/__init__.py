"""A recipe's plan, before anything runs: the mesh of ranks, each rank's layers and memory, the messages of a step.

The plan is arithmetic on the recipe and on shapes; `render` prints it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from netfold.train.explain.layers import Layer, measure
from netfold.train.explain.memory import Memory, a_parameter, fsdp2, passes_kept
from netfold.train.explain.traffic import Traffic, held_by, traffic
from netfold.train.parallel.stages import cut
from netfold.train.parallel.tensor import styles_of
from netfold.train.recipe import Recipe
from netfold.train.recipe.split import Split
from netfold.train.recipe.validate import ValidatedRecipe


@dataclass(frozen=True)
class Place:
    """The ranks at one place of the pipeline. They hold the same layers."""

    ranks: tuple[int, ...]
    stages: tuple[tuple[str, ...], ...]
    """The layers' names, for each stage of these ranks."""
    parameters: int
    """Elements per rank, after tensor parallelism and `embeddings` have divided them, and before ZeRO does."""
    memory: Memory
    """Of one rank."""
    traffic: tuple[Traffic, ...]


@dataclass(frozen=True)
class Plan:
    recipe: Recipe
    split: Split
    steps: int
    parameters: int
    """Of the whole model."""
    places: tuple[Place, ...]
    notes: tuple[str, ...]
    """Explanations beside the tables."""
    unknown: bool
    """Activations, and messages inside layers and between stages, could not be measured; a note says why."""


def explain(recipe: Recipe, checked: ValidatedRecipe) -> Plan:
    """Plan a validated recipe; takes over its model. The memory excludes torch itself and the data."""
    split, model = checked.split, checked.model
    whole = sum(parameter.numel() for parameter in model.module.parameters())
    layers, unknown = measure(
        model,
        checked.fake,
        checked.example,
        samples=split.samples,
        precision=recipe.training.precision,
        tensor=split.tensor,
        styles=styles_of(model, recipe.parallel),
        fsdp=recipe.parallel.zero > 0 and split.data > 1,
    )
    counted = any(layer.operations for layer in layers)
    bounds = cut([layer.operations if counted else layer.parameters for layer in layers], split.stages)
    stages = [[layers[number] for number in bounds.layers(stage)] for stage in range(split.stages)]
    places = tuple(_place(recipe, split, stages, number, bool(unknown)) for number in range(split.pipeline))
    epochs, training = recipe.training.epochs or 0, recipe.training
    steps = training.steps or -(-epochs * len(checked.data.train) // split.batch)
    notes = _notes(recipe, split, places, counted)
    if unknown:
        notes.append(f"activations, and messages inside layers and between stages, are unknown: {unknown}")
    return Plan(recipe, split, steps, whole, places, tuple(notes), bool(unknown))


def rank_at(split: Split, pipeline: int, data: int, tensor: int) -> int:
    """The number of the rank at this place of the mesh."""
    return (pipeline * split.data + data) * split.tensor + tensor


def _notes(recipe: Recipe, split: Split, places: Sequence[Place], counted: bool) -> list[str]:
    found = []
    if split.pipeline > 1:
        by = "operations of matrix products, convolutions and attention" if counted else "parameters"
        found.append(f"stages are cut by {by} here, an estimate; training measures its layers and may cut elsewhere")
    held = fsdp2(recipe, split.data)
    if held is not None:
        most = max(place.parameters for place in places)
        between, forward = (f"{each:g} bytes a parameter ({size(each * most)})" for each in held)
        found.append(
            f"weights, gradients and optimizer are ZeRO's formula; torch's FSDP2 has {between} of them between steps "
            f"and {forward} at the end of a forward pass"
        )
    return found


def size(count: float) -> str:
    """12 B, 3.4 kB, 56.7 MB: in powers of 1000, as for network rates."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _place(recipe: Recipe, split: Split, stages: Sequence[Sequence[Layer]], number: int, unknown: bool) -> Place:
    held = [stages[stage] for stage in held_by(recipe, split, number)]
    layers = [layer for stage in held for layer in stage]
    tables = sum(layer.table_parameters for layer in layers) if recipe.parallel.embeddings != "replicated" else 0
    rest = sum(layer.parameters for layer in layers) - tables
    each, alone = a_parameter(recipe, split.data), a_parameter(recipe, 1)
    table = tables / split.data
    activations = None
    if not unknown:
        a_pass = sum(layer.saved_bytes or 0 for layer in layers) / len(held)
        activations = a_pass * passes_kept(recipe, split, number)
    memory = Memory(
        each.weights * rest + alone.weights * table,
        each.gradients * rest + alone.gradients * table,
        each.state * rest + alone.state * table,
        activations,
    )
    ranks = tuple(rank_at(split, number, d, t) for d in range(split.data) for t in range(split.tensor))
    names = tuple(tuple(layer.name for layer in stage) for stage in held)
    return Place(ranks, names, rest + -(-tables // split.data), memory, tuple(traffic(recipe, split, stages, number)))
