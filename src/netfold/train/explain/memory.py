"""What a rank needs memory for: weights, gradients and the optimizer's state by ZeRO's formulas (Rajbhandari et al.
2020, section 3.1 and figure 1), and what forward passes leave for backward ones."""

from __future__ import annotations

from dataclasses import dataclass

from netfold.train.recipe import Optimizer, Recipe
from netfold.train.recipe.split import Split

F32_BYTES = 4


@dataclass(frozen=True)
class Memory:
    """Bytes; of one parameter, or of a rank."""

    weights: float
    """In f32, and the copies that are computed with in bf16 or f16."""
    gradients: float
    state: float
    """The optimizer's; in ZeRO 2 and 3 with the f32 weights, where others are computed with."""
    activations: float | None = None
    """At the fullest moment of a step; None: not known."""

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.state + (self.activations or 0.0)


def computed_bytes(recipe: Recipe) -> int:
    """Of a number that is computed with: a weight in a forward pass, an activation."""
    return F32_BYTES if recipe.training.precision == "f32" else 2


def a_parameter(recipe: Recipe, data: int) -> Memory:
    """Bytes a parameter of the model, on a rank, with `data` ranks that ZeRO can share among."""
    # Gradients are f32, and so are the weights that the optimizer steps on, of which ZeRO 1 leaves every rank all.
    weights, gradients, state = float(computed_bytes(recipe)), float(F32_BYTES), float(_state_bytes(recipe.optimizer))
    if recipe.training.precision != "f32" and recipe.parallel.zero >= 2:
        state += F32_BYTES
    elif recipe.training.precision != "f32":
        weights += F32_BYTES
    if recipe.diloco is not None:
        # What all ranks started from, and the outer optimizer's momentum.
        state += F32_BYTES * (2 if recipe.diloco.momentum else 1)
    zero = recipe.parallel.zero
    return Memory(
        weights / (data if zero >= 3 else 1), gradients / (data if zero >= 2 else 1), state / (data if zero >= 1 else 1)
    )


def fsdp2(recipe: Recipe, data: int) -> tuple[float, float] | None:
    """Bytes a parameter that torch's FSDP2 holds, of weights, gradients and state: between steps, and at the end of a
    forward pass. None where it is not used.

    It has no weights of the lower kind beside f32 ones: of its rows a rank holds weight, gradient and state in f32
    (bench/results/train_memory.md). Whole weights, in what is computed with, stay from the forward to the backward pass
    in ZeRO 2 alone, when there are no gradients.
    """
    zero = recipe.parallel.zero
    if zero < 2 or data == 1:
        return None
    kept = F32_BYTES + _state_bytes(recipe.optimizer)
    return (kept + F32_BYTES) / data, kept / data + (computed_bytes(recipe) if zero == 2 else 0)


def _state_bytes(optimizer: Optimizer) -> int:
    """Adam and LAMB keep two moments, SGD and LARS a momentum, unless it is 0."""
    if optimizer.name in ("adam", "adamw", "lamb"):
        return 2 * F32_BYTES
    return F32_BYTES if optimizer.momentum else 0


def passes_kept(recipe: Recipe, split: Split, pipeline_rank: int) -> int:
    """Forward passes through one stage of a rank whose backward passes are still to come, at most.

    GPipe keeps all; 1F1B as many as there are stages from here on; interleaved schedules those of their warm-up
    (Narayanan et al. 2021, section 2.2), here in passes through any of the rank's stages; ZB-V as many microbatches as
    there are ranks (Qi et al. 2023). What waits for the gradients of weights in zero-bubble schedules is not counted.
    """
    every, behind = split.microbatches, split.pipeline - pipeline_rank
    held = split.stages // split.pipeline
    if split.pipeline == 1:
        return 1
    if recipe.parallel.schedule == "gpipe":
        return every
    if recipe.parallel.schedule == "1f1b":
        return min(every, behind)
    if recipe.parallel.schedule == "zero-bubble-v":
        return held * min(every, split.pipeline)
    return min(every * held, (held - 1) * split.pipeline + 2 * (behind - 1) + 1)
