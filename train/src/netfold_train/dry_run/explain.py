"""A recipe's plan, before anything runs: the mesh of ranks, each rank's layers and memory, the messages of a step.

The plan is arithmetic on the recipe and on shapes; `render` prints it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from netfold_plan.shared_rules import waiting_passes
from netfold_plan.step.prediction import Memory
from netfold_train.dry_run.layers import Layer, measure
from netfold_train.dry_run.traffic import F32_BYTES, Traffic, computed_bytes, stages_held, traffic
from netfold_train.dry_run.validate import ValidatedRecipe
from netfold_train.parallel.stages import cut
from netfold_train.parallel.tensor import styles_of
from netfold_train.recipe import DiLoCo, Recipe
from netfold_train.recipe.split import Split


@dataclass(frozen=True)
class Place:
    """The ranks at one place of the pipeline. They hold the same layers."""

    ranks: tuple[int, ...]
    stages: tuple[tuple[str, ...], ...]
    """The layers' names, for each stage of these ranks."""
    parameters: int
    """Elements per rank, after tensor parallelism and owners have divided them, and before ZeRO does."""
    memory: Memory
    """Of one rank; activations at the largest moment of a step."""
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
        fsdp=split.fsdp,
        context=split.context,
        recomputes=recipe.training.recompute,
    )
    counted = any(layer.operations for layer in layers)
    bounds = cut([layer.operations if counted else layer.parameters for layer in layers], split.stages)
    stages = [[layers[number] for number in bounds.layers(stage)] for stage in range(split.stages)]
    places = tuple(_place(recipe, split, stages, number) for number in range(split.pipeline))
    epochs, training = recipe.training.epochs or 0, recipe.training
    steps = training.steps or -(-epochs * len(checked.data.train) // split.batch)
    notes = []
    if split.pipeline > 1:
        by = "operations of matrix products, convolutions and attention" if counted else "parameters"
        notes.append(f"stages are cut by {by} here, an estimate; training measures its layers and may cut elsewhere")
    if recipe.parallel.experts != "replicated":
        notes.append("messages of tokens are those of experts that are all used alike")
    if recipe.training.recompute != "none" and counted:
        again = sum(layer.again for layer in layers) / sum(layer.operations for layer in layers)
        notes.append(
            f"training.recompute adds {again:.0%} to the operations of matrix products, convolutions and attention; "
            "activations are those that are kept, and all of the largest block"
        )
    if unknown:
        notes.append(f"activations, and messages inside layers and between stages, are unknown: {unknown}")
    return Plan(recipe, split, steps, whole, places, tuple(notes), bool(unknown))


def _place(recipe: Recipe, split: Split, stages: Sequence[Sequence[Layer]], number: int) -> Place:
    held = [stages[stage] for stage in stages_held(recipe, split, number)]
    layers = [layer for stage in held for layer in stage]
    owned = sum(layer.owned_parameters(recipe.parallel) for layer in layers)
    rest = sum(layer.parameters for layer in layers) - owned
    each, alone = a_parameter(recipe, split.data), a_parameter(recipe, 1)
    share = owned / split.data
    kept = sum(layer.saved_bytes or 0 for layer in layers) / len(held) * passes_kept(recipe, split, number)
    kept += max(map(recomputed_bytes, held))
    memory = Memory(
        each.weights * rest + alone.weights * share,
        each.gradients * rest + alone.gradients * share,
        each.optimizer * rest + alone.optimizer * share,
        kept,
    )
    a_place = split.data * split.tensor
    names = tuple(tuple(layer.name for layer in stage) for stage in held)
    sent = tuple(traffic(recipe, split, stages, number))
    ranks = tuple(range(number * a_place, (number + 1) * a_place))
    return Place(ranks, names, rest + -(-owned // split.data), memory, sent)


def recomputed_bytes(stage: Sequence[Layer]) -> int:
    """Bytes that a stage's largest block adds, while it is recomputed, to those that are kept of one pass."""
    before = peak = 0
    for layer in stage:
        saved = layer.saved_bytes or 0
        before, peak = before + saved, max(peak, before + layer.peak_bytes)
    return max(0, peak - before)


def a_parameter(recipe: Recipe, data: int) -> Memory:
    """Bytes per parameter of the model on one of `data` data-parallel ranks, without activations."""
    optimizer, zero, lower = recipe.optimizer, recipe.parallel.zero, computed_bytes(recipe)
    moments: float = 2 if optimizer.name in ("adam", "adamw", "lamb") else 1 if optimizer.momentum else 0
    moments += recipe.training.ema is not None
    if recipe.diloco is not None:
        # The outer weights, and the outer optimizer's momentum.
        moments += 2 if recipe.diloco.momentum else 1
        moments += under_way(recipe.diloco, data)
    state = moments * F32_BYTES
    if zero and data > 1:
        # A rank of FSDP2 holds weight, gradient and state of its rows in f32 (lab/bench/results/train_memory.md). ZeRO
        # 1 and 2 also keep whole weights in the type of computation, from the forward to the backward pass.
        return Memory(F32_BYTES / data + (lower if zero < 3 else 0), F32_BYTES / data, state / data, 0.0)
    weights = F32_BYTES + (lower if lower != F32_BYTES else 0)
    return Memory(weights, F32_BYTES, state, 0.0)


def under_way(diloco: DiLoCo, data: int) -> float:
    """f32 numbers per parameter for the fragments under way, at most, and for the rounding errors of i8."""
    last = diloco.every - diloco.overlap
    sends = [-(-number * last // diloco.fragments) for number in range(1, diloco.fragments + 1)]
    fragments = max(sum(step <= other < step + diloco.overlap for step in sends) for other in sends)
    rounding = (diloco.sites or data) / data if diloco.wire == "i8" else 0.0
    return 2 * fragments / diloco.fragments + rounding


def passes_kept(recipe: Recipe, split: Split, pipeline_rank: int) -> int:
    """The largest number of forward passes through one stage of a rank whose backward passes are still to come.

    Passes that wait for the gradients of weights in zero-bubble schedules are not counted.
    """
    schedule = recipe.parallel.schedule
    return waiting_passes(
        # torch runs ZB-H1 as an interleaved schedule with a split backward pass; the planner's "zero-bubble" is ZB-V.
        {"zero-bubble": "interleaved", "zero-bubble-v": "zero-bubble"}.get(schedule, schedule),
        pipeline_rank,
        pipeline=split.pipeline,
        interleave=split.stages // split.pipeline,
        microbatches=split.microbatches,
    )
