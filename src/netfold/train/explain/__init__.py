"""A recipe's plan, before anything runs: ranks as a mesh, what each holds and needs, what travels in a step.

Arithmetic on what the recipe says and on shapes; `show` prints it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from netfold.train.checked import Checked
from netfold.train.explain.layers import Layer, measure
from netfold.train.explain.memory import Memory, a_parameter, passes_kept
from netfold.train.explain.traffic import Traffic, traffic
from netfold.train.recipe import Recipe
from netfold.train.split import Split, stages_held


@dataclass(frozen=True)
class Place:
    """The ranks at one place of the pipeline, which hold the same layers."""

    ranks: tuple[int, ...]
    stages: tuple[tuple[str, ...], ...]
    """The names of the layers of each stage that is held."""
    parameters: int
    """Elements, before ZeRO shares them out; after tensor parallelism and tables have."""
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
    unknown: str
    """Why activations, and what travels inside layers and between stages, are not known; "" where they are."""


def explain(recipe: Recipe, checked: Checked) -> Plan:
    """Takes over the model that was checked. The memory is that of what is named; torch itself and the data come on
    top."""
    split, model = checked.split, checked.model
    whole = sum(parameter.numel() for parameter in model.module.parameters())
    styles = None
    if split.tensor > 1 and model.tensor_plan is not None:
        styles = model.tensor_plan(recipe.parallel.style, recipe.parallel.sequence)
    layers, unknown = measure(
        model,
        checked.fake,
        checked.example,
        samples=split.samples,
        precision=recipe.training.precision,
        tensor=split.tensor,
        plan=styles,
    )
    stages = [layers[first:end] for first, end in cut([layer.parameters for layer in layers], split.stages)]
    places = tuple(_place(recipe, split, stages, number, bool(unknown)) for number in range(split.pipeline))
    epochs, training = recipe.training.epochs or 0, recipe.training
    steps = training.steps or -(-epochs * len(checked.data.train) // split.batch)
    return Plan(recipe, split, steps, whole, places, unknown)


def cut(costs: Sequence[float], stages: int) -> list[tuple[int, int]]:
    """Runs of layers (first, end), one a stage and none empty, whose dearest is as cheap as can be.

    By dynamic programming, in stages x layers^2 steps.
    """
    layers = len(costs)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # Of the first `end` layers in so many stages: the cost of the dearest, and where the last of them begins.
    best = [(sums[end], 0) for end in range(layers + 1)]
    begins = [[0] * (layers + 1)]
    for stage in range(1, stages):
        best = [
            min((max(best[first][0], sums[end] - sums[first]), first) for first in range(stage, end))
            if end > stage
            else (float("inf"), 0)
            for end in range(layers + 1)
        ]
        begins.append([first for _, first in best])
    found, end = [], layers
    for row in reversed(begins):
        found.append((row[end], end))
        end = row[end]
    return found[::-1]


def rank_at(split: Split, pipeline: int, data: int, tensor: int) -> int:
    """The number of the rank at this place of the mesh."""
    return (pipeline * split.data + data) * split.tensor + tensor


def _place(recipe: Recipe, split: Split, stages: Sequence[Sequence[Layer]], number: int, unknown: bool) -> Place:
    held = [stages[stage] for stage in stages_held(split, number)]
    layers = [layer for stage in held for layer in stage]
    tables = sum(layer.table_parameters for layer in layers) if recipe.parallel.tables != "replicated" else 0
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
