"""How a recipe divides ranks and samples: whole numbers, or sentences about what does not divide or fit together.

Pure arithmetic on the recipe. `split` makes all checks before a process starts; each part of `parallel` makes its own
check again, for callers that use the part alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from netfold.train.recipe import Parallel, Recipe
from netfold.train.recipe.errors import RecipeError

SEVERAL_A_RANK = ("interleaved", "zero-bubble", "zero-bubble-v")
SPLIT_BACKWARD = ("zero-bubble", "zero-bubble-v")


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

    @property
    def ranks(self) -> int:
        return self.pipeline * self.data * self.tensor

    @property
    def samples(self) -> int:
        """Samples of one pass through a rank's layers."""
        return self.batch // (self.data * self.accumulate * self.microbatches)


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
    """Divide `ranks` ranks and the batch. Raises RecipeError with everything that does not divide or fit together."""
    parallel, training = recipe.parallel, recipe.training
    problems: list[str] = []
    replica = parallel.pipeline * parallel.tensor
    data = parallel.data or max(1, ranks // replica)
    if replica * data != ranks:
        problems.append(_ranks(parallel, ranks, replica))
        # The other checks then use the recipe's own number of data-parallel ranks.
        data = parallel.data or 1
    microbatches = (parallel.microbatches or parallel.pipeline) if parallel.pipeline > 1 else 1
    parts = training.accumulate * microbatches * (data if training.scaling == "strong" else 1)
    if training.batch % parts:
        problems.append(_batch(recipe, data, microbatches, parts))
    problems += check_batch_norm(parallel.batch_norm, data) + _check_pipeline(recipe, microbatches)
    problems += check_buckets(parallel, data) + check_embeddings(parallel) + check_sequence(parallel)
    problems += check_rewind(recipe)
    if problems:
        raise RecipeError(problems)
    batch = training.batch * (data if training.scaling == "weak" else 1)
    stages = parallel.pipeline * stages_a_rank(parallel)
    return Split(parallel.pipeline, data, parallel.tensor, stages, microbatches, training.accumulate, batch)


def check_buckets(parallel: Parallel, data: int) -> list[str]:
    if not parallel.zero or data == 1 or parallel.bucket_mb is None:
        return []
    return [
        f"parallel.bucket_mb is {parallel.bucket_mb:g}, but with parallel.zero = {parallel.zero} a layer's gradients "
        "are sent together, whatever their size: leave one of the two out"
    ]


def check_embeddings(parallel: Parallel) -> list[str]:
    if parallel.embeddings == "replicated" or not parallel.zero:
        return []
    return [
        f'parallel.embeddings = "{parallel.embeddings}" and parallel.zero = {parallel.zero} both divide the tables; '
        "set zero = 0"
    ]


def check_batch_norm(ranks: int, data: int) -> list[str]:
    if data % ranks == 0:
        return []
    divisors = ", ".join(str(each) for each in range(1, data + 1) if data % each == 0)
    return [
        f"parallel.batch_norm is {ranks}, which does not divide the {data} data-parallel ranks (parallel.data); "
        f"set one of {divisors}"
    ]


def check_sequence(parallel: Parallel) -> list[str]:
    if not parallel.sequence:
        return []
    if parallel.tensor == 1:
        return ["parallel.sequence is true, but parallel.tensor is 1 cuts nothing; set tensor = 2 or more"]
    if parallel.style == "alternating":
        return []
    return [
        f'parallel.sequence is true, but parallel.style is "{parallel.style}": the sequence is cut between pairs '
        'of layers; set style = "alternating"'
    ]


def check_rewind(recipe: Recipe) -> list[str]:
    if recipe.fault_tolerance.non_finite != "rewind" or recipe.checkpoint.every != "end":
        return []
    return ["fault_tolerance.non_finite is 'rewind', but there are no checkpoints to go back to: set checkpoint.every"]


def _check_pipeline(recipe: Recipe, microbatches: int) -> list[str]:
    parallel, accumulate = recipe.parallel, recipe.training.accumulate
    if parallel.pipeline == 1:
        return []
    schedule, ranks, found = parallel.schedule, parallel.pipeline, []
    if accumulate > 1:
        found.append(
            f"training.accumulate is {accumulate}, but a pipeline cuts a batch into microbatches: "
            f"leave it out and set parallel.microbatches = {microbatches * accumulate}"
        )
    if schedule in SPLIT_BACKWARD and parallel.zero:
        found.append(
            f"parallel.schedule is {schedule!r}, which cannot go with parallel.zero = {parallel.zero}: FSDP "
            "would miss the gradients of weights, which are computed later; set zero = 0, or take 'interleaved'"
        )
    if schedule in SPLIT_BACKWARD and parallel.embeddings != "replicated":
        found.append(
            f"parallel.schedule is {schedule!r}, which averages all gradients, but parallel.embeddings = "
            f"{parallel.embeddings!r} leaves tables to their owners: take 'interleaved'"
        )
    if schedule == "zero-bubble-v" and parallel.interleave != 2:
        found.append(
            f"parallel.interleave is {parallel.interleave}, but parallel.schedule = 'zero-bubble-v' needs 2: "
            "leave it out, or take 'zero-bubble'"
        )
    if schedule == "1f1b" and microbatches < ranks:
        found.append(
            f"parallel.microbatches is {microbatches}, but parallel.schedule = '1f1b' needs at least one for each of "
            f"{ranks} stages: set {ranks} or more, or take 'gpipe'"
        )
    rounds = max(1, microbatches // ranks)
    if schedule in ("interleaved", "zero-bubble") and microbatches % rounds:
        found.append(
            f"parallel.microbatches is {microbatches}, which parallel.schedule = {schedule!r} cannot divide "
            f"over {ranks} ranks: set {ranks * rounds} or {ranks * (rounds + 1)}"
        )
    return found


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


def _batch(recipe: Recipe, data: int, microbatches: int, parts: int) -> str:
    training = recipe.training
    factors = [f"parallel.data {data}"] if training.scaling == "strong" else []
    factors += [f"training.accumulate {training.accumulate}"] if training.accumulate > 1 else []
    factors += [f"parallel.microbatches {microbatches}"] if microbatches > 1 else []
    below = training.batch // parts * parts
    multiples = " or ".join(str(each) for each in (below, below + parts) if each)
    return (
        f"training.batch is {training.batch}, which does not divide by {' x '.join(factors)}"
        f"{f' = {parts}' if len(factors) > 1 else ''}; set {multiples}"
    )
