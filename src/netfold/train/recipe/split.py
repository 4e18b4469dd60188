"""How a recipe shares out ranks and samples: whole numbers, or sentences that say why they do not come out even."""

from __future__ import annotations

from dataclasses import dataclass

from netfold.train.recipe import Parallel, Recipe, constraints
from netfold.train.recipe.errors import RecipeError
from netfold.train.recipe.schedules import stages_a_rank


@dataclass(frozen=True)
class Split:
    """Ranks as pipeline x data x tensor, and a step's samples on them."""

    pipeline: int
    data: int
    tensor: int
    stages: int
    """Of the pipeline: as many as its ranks, or `interleave` times as many."""
    microbatches: int
    """1 where there is no pipeline."""
    accumulate: int
    batch: int
    """Samples a step, of the whole job."""

    @property
    def ranks(self) -> int:
        return self.pipeline * self.data * self.tensor

    @property
    def samples(self) -> int:
        """That go through a rank's layers at once."""
        return self.batch // (self.data * self.accumulate * self.microbatches)


def ranks_asked(parallel: Parallel) -> int:
    """Without `data`, those that one replica of the model needs."""
    return parallel.pipeline * (parallel.data or 1) * parallel.tensor


def split(recipe: Recipe, ranks: int) -> Split:
    """On so many ranks. Raises RecipeError: all that does not come out even or go together."""
    parallel, training = recipe.parallel, recipe.training
    problems: list[str] = []
    replica = parallel.pipeline * parallel.tensor
    data = parallel.data or max(1, ranks // replica)
    if replica * data != ranks:
        problems.append(_ranks(parallel, ranks, replica))
        # What else is wrong is wrong on any number of ranks, unless that one decided how often the batch is cut.
        data = parallel.data or 1
    microbatches = (parallel.microbatches or parallel.pipeline) if parallel.pipeline > 1 else 1
    parts = training.accumulate * microbatches * (data if training.scaling == "strong" else 1)
    if training.batch % parts:
        problems.append(_batch(recipe, data, microbatches, parts))
    problems += constraints.batch_norm(parallel.batch_norm, data) + constraints.pipeline(recipe, microbatches)
    problems += constraints.buckets(parallel, data) + constraints.embeddings(parallel) + constraints.sequence(parallel)
    problems += constraints.rewind(recipe)
    if problems:
        raise RecipeError(problems)
    batch = training.batch * (data if training.scaling == "weak" else 1)
    stages = parallel.pipeline * stages_a_rank(parallel)
    return Split(parallel.pipeline, data, parallel.tensor, stages, microbatches, training.accumulate, batch)


def _ranks(parallel: Parallel, ranks: int, replica: int) -> str:
    there = f"there {'is' if ranks == 1 else 'are'} {ranks} rank{'' if ranks == 1 else 's'}"
    if parallel.data is None:
        would = [replica * max(1, ranks // replica), replica * (ranks // replica + 1)]
        return (
            f"parallel.pipeline {parallel.pipeline} x parallel.tensor {parallel.tensor} is {replica}, but {there}, "
            f"which is no multiple of it; start {_choice(sorted(set(would)))}"
        )
    product = replica * parallel.data
    fix = f"parallel.data = {ranks // replica} would do, or " if ranks % replica == 0 else ""
    return (
        f"parallel.pipeline {parallel.pipeline} x parallel.data {parallel.data} x parallel.tensor {parallel.tensor} is "
        f"{product}, but {there}; {fix}start {product}"
    )


def _batch(recipe: Recipe, data: int, microbatches: int, parts: int) -> str:
    training = recipe.training
    factors = [f"parallel.data {data}"] if training.scaling == "strong" else []
    factors += [f"training.accumulate {training.accumulate}"] if training.accumulate > 1 else []
    factors += [f"parallel.microbatches {microbatches}"] if microbatches > 1 else []
    below = training.batch // parts * parts
    would = [each for each in (below, below + parts) if each]
    return (
        f"training.batch is {training.batch}, which does not divide by {' x '.join(factors)}"
        f"{f' = {parts}' if len(factors) > 1 else ''}; {_choice(would)} would do"
    )


def _choice(numbers: list[int]) -> str:
    return " or ".join(str(number) for number in numbers)
