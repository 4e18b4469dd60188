"""The memory of a rank: weights, gradients and optimizer state by ZeRO's formulas, and waiting activations."""

from __future__ import annotations

from dataclasses import dataclass

from netfold.plan.job import OPTIMIZERS
from netfold.plan.shared_rules import waiting_passes, zero_bytes
from netfold.train.recipe import Optimizer, Recipe
from netfold.train.recipe.split import Split

F32_BYTES = 4


@dataclass(frozen=True)
class Memory:
    """Bytes of one parameter, or of a rank."""

    weights: float
    """In f32, and the bf16 or f16 copies for computation."""
    gradients: float
    state: float
    """Of the optimizer; in ZeRO with the f32 weights, if computation is in another type."""
    activations: float | None = None
    """At the largest moment of a step; None: unknown."""

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.state + (self.activations or 0.0)


def computed_bytes(recipe: Recipe) -> int:
    """Bytes of a weight or activation in a forward pass."""
    return F32_BYTES if recipe.training.precision == "f32" else 2


def planned_optimizer(optimizer: Optimizer) -> str:
    """The planner's optimizer with the same state: Adam and LAMB keep two moments, SGD and LARS a momentum unless 0."""
    if optimizer.name in ("adam", "adamw", "lamb"):
        return "adam"
    return "momentum" if optimizer.momentum else "sgd"


def a_parameter(recipe: Recipe, data: int) -> Memory:
    """Bytes per parameter of the model on one rank; ZeRO divides them among `data` ranks."""
    # Gradients are f32, and so are the weights that the optimizer steps on. ZeRO 1 is ZeRO 2.
    zero = max(recipe.parallel.zero, 2) if recipe.parallel.zero else 0
    weights, state = computed_bytes(recipe), OPTIMIZERS[planned_optimizer(recipe.optimizer)]
    if recipe.training.precision != "f32" and zero:
        state += F32_BYTES
    elif recipe.training.precision != "f32":
        weights += F32_BYTES
    if recipe.diloco is not None:
        # The weights at the start of the round, and the outer optimizer's momentum.
        state += F32_BYTES * (2 if recipe.diloco.momentum else 1)
    return Memory(*zero_bytes(weights, F32_BYTES, state, zero=zero, data=data))


def fsdp2(recipe: Recipe, data: int) -> tuple[float, float] | None:
    """Bytes per parameter of weights, gradients and state in torch's FSDP2: between steps, and after a forward pass.

    None if FSDP2 is not used. A rank holds weight, gradient and state of its rows in f32, and no lower copies beside
    them (bench/results/train_memory.md). Only ZeRO 1 and 2 keep whole weights, in the type of computation, from the
    forward to the backward pass, when there are no gradients.
    """
    zero = recipe.parallel.zero
    if not zero or data == 1:
        return None
    kept = F32_BYTES + OPTIMIZERS[planned_optimizer(recipe.optimizer)]
    return (kept + F32_BYTES) / data, kept / data + (computed_bytes(recipe) if zero < 3 else 0)


def passes_kept(recipe: Recipe, split: Split, pipeline_rank: int) -> int:
    """The largest number of forward passes through one stage of a rank whose backward passes are still to come.

    Passes that wait for the gradients of weights in zero-bubble schedules are not counted.
    """
    # torch runs ZB-H1 as an interleaved schedule with a split backward pass; the planner's "zero-bubble" is ZB-V.
    schedule = {"zero-bubble": "interleaved", "zero-bubble-v": "zero-bubble"}.get(
        recipe.parallel.schedule, recipe.parallel.schedule
    )
    return waiting_passes(
        schedule,
        pipeline_rank,
        pipeline=split.pipeline,
        interleave=split.stages // split.pipeline,
        microbatches=split.microbatches,
    )
