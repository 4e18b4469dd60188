"""The division of ranks and samples by a recipe: whole numbers, or sentences about what does not divide."""

from __future__ import annotations

import math
from dataclasses import dataclass

from netfold_train.recipe import DiLoCo, Parallel, Recipe
from netfold_train.recipe.errors import RecipeError

SEVERAL_A_RANK = ("interleaved", "zero-bubble", "zero-bubble-v")
SPLIT_BACKWARD = ("zero-bubble", "zero-bubble-v")
# A byte has 127 levels to either side of zero, which the ranks of a sum share (docs/explanation/numbers.md).
I8_RANKS = 32


@dataclass(frozen=True)
class Split:
    """Ranks as pipeline x data x tensor, and the samples of a step on them."""

    pipeline: int
    data: int
    tensor: int
    stages: int
    """Of the pipeline: one or `interleave` per rank of it."""
    microbatches: int
    """1 without a pipeline."""
    accumulate: int
    batch: int
    """Samples per step, of the whole job."""
    fsdp: bool
    """FSDP2 averages gradients, and casts weights and inputs in a lower precision; otherwise DDP and autocast do."""
    context: int = 1
    """Data-parallel ranks that share samples."""

    @property
    def ranks(self) -> int:
        return self.pipeline * self.data * self.tensor

    @property
    def passes(self) -> int:
        """Passes through a rank's layers in a step."""
        return self.accumulate * self.microbatches

    @property
    def samples(self) -> int:
        """Samples of one pass through a rank's layers."""
        return self.batch * self.context // (self.data * self.passes)


def ranks_asked(parallel: Parallel) -> int:
    """The ranks of the mesh; without `data`, the ranks of one replica of the model."""
    return parallel.pipeline * (parallel.data or 1) * parallel.tensor


def stages_a_rank(parallel: Parallel) -> int:
    return parallel.interleave if parallel.pipeline > 1 and parallel.schedule in SEVERAL_A_RANK else 1


def stages_of(rank: int, ranks: int, each: int, schedule: str) -> tuple[int, ...]:
    """The stages of a rank of the pipeline, of ranks x each: every ranks-th stage, or for ZB-V there and back."""
    if schedule == "zero-bubble-v":
        return rank, 2 * ranks - 1 - rank
    return tuple(range(rank, ranks * each, ranks))


def split(recipe: Recipe, ranks: int) -> Split:
    """Divide `ranks` ranks and the batch. Raises RecipeError with everything that does not divide."""
    parallel, training = recipe.parallel, recipe.training
    problems: list[str] = []
    replica = parallel.pipeline * parallel.tensor
    data = parallel.data or max(1, ranks // replica)
    if replica * data != ranks:
        problems.append(_ranks(parallel, ranks, replica))
        # The other checks then use the recipe's own number of data-parallel ranks.
        data = parallel.data or 1
    microbatches = (parallel.microbatches or parallel.pipeline) if parallel.pipeline > 1 else 1
    context = parallel.context if data % parallel.context == 0 else 1
    key = "parallel.data" if context == 1 else "parallel.data / parallel.context"
    factors = {key: data // context} if training.scaling == "strong" else {}
    factors |= {"training.accumulate": training.accumulate, "parallel.microbatches": microbatches}
    problems += _batch(training.batch, factors) + check_batch_norm(parallel.batch_norm, data)
    problems += _divides("parallel.shard", parallel.shard or data, data)
    problems += _divides("parallel.context", parallel.context, data)
    problems += _sites(recipe.diloco, data) if recipe.diloco is not None else []
    if problems:
        raise RecipeError(problems)
    batch = training.batch * (data // context if training.scaling == "weak" else 1)
    stages = parallel.pipeline * stages_a_rank(parallel)
    by_hand = parallel.pipeline > 1 and parallel.schedule in SPLIT_BACKWARD
    fsdp = data > 1 and (parallel.zero > 0 or (parallel.tensor > 1 and recipe.diloco is None and not by_hand))
    passes = microbatches, training.accumulate
    return Split(parallel.pipeline, data, parallel.tensor, stages, *passes, batch, fsdp, context)


def check_batch_norm(ranks: int, data: int) -> list[str]:
    return _divides("parallel.batch_norm", ranks, data)


def _sites(diloco: DiLoCo, data: int) -> list[str]:
    sites = diloco.sites or data
    problems = _divides("diloco.sites", sites, data)
    if diloco.wire == "i8" and sites > I8_RANKS:
        problems.append(
            f"diloco.wire is 'i8', in which numbers of at most {I8_RANKS} sites can be added, and there are {sites} "
            "(diloco.sites); set 'bf16'"
        )
    return problems


def _divides(key: str, count: int, data: int) -> list[str]:
    if data % count == 0:
        return []
    divisors = ", ".join(str(each) for each in range(1, data + 1) if data % each == 0)
    return [
        f"{key} is {count}, which does not divide the {data} data-parallel ranks (parallel.data); set one of {divisors}"
    ]


def _ranks(parallel: Parallel, ranks: int, replica: int) -> str:
    there = f"there {'is' if ranks == 1 else 'are'} {ranks} rank{'' if ranks == 1 else 's'}"
    if parallel.data is None:
        multiples = {replica * max(1, ranks // replica), replica * (ranks // replica + 1)}
        return (
            f"parallel.pipeline {parallel.pipeline} x parallel.tensor {parallel.tensor} is {replica}, but {there}, "
            f"which is not a multiple of it; start {' or '.join(map(str, sorted(multiples)))}"
        )
    product = replica * parallel.data
    fix = f"set parallel.data = {ranks // replica}, or " if ranks % replica == 0 else ""
    return (
        f"parallel.pipeline {parallel.pipeline} x parallel.data {parallel.data} x parallel.tensor {parallel.tensor} is "
        f"{product}, but {there}; {fix}start {product}"
    )


def _batch(batch: int, factors: dict[str, int]) -> list[str]:
    parts = math.prod(factors.values())
    if batch % parts == 0:
        return []
    named = [f"{key} {factor}" for key, factor in factors.items() if factor > 1]
    below = batch // parts * parts
    multiples = " or ".join(str(each) for each in (below, below + parts) if each)
    return [
        f"training.batch is {batch}, which does not divide by {' x '.join(named)}"
        f"{f' = {parts}' if len(named) > 1 else ''}; set {multiples}"
    ]
