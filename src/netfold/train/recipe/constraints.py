"""What a recipe asks for that cannot be, on so many data-parallel ranks: sentences, from the recipe alone.

Said before any process starts (`split`), and by each part to those who use it alone.
"""

from __future__ import annotations

from netfold.train.recipe import Parallel, Recipe
from netfold.train.recipe.schedules import SPLIT_BACKWARD


def pipeline(recipe: Recipe, microbatches: int) -> list[str]:
    parallel, accumulate = recipe.parallel, recipe.training.accumulate
    if parallel.pipeline == 1:
        return []
    schedule, ranks, found = parallel.schedule, parallel.pipeline, []
    if accumulate > 1:
        found.append(
            f"training.accumulate is {accumulate}, but a pipeline goes through a batch in microbatches: "
            f"leave it out and set parallel.microbatches = {microbatches * accumulate}"
        )
    if schedule in SPLIT_BACKWARD and parallel.zero >= 2:
        found.append(
            f"parallel.schedule is {schedule!r}, which cannot go with parallel.zero = {parallel.zero}: FSDP "
            "would miss gradients that are computed apart; make it 1, or take 'interleaved'"
        )
    if schedule in SPLIT_BACKWARD and parallel.embeddings != "replicated":
        found.append(
            f"parallel.schedule is {schedule!r}, under which all gradients are averaged, but "
            f"parallel.embeddings = {parallel.embeddings!r} leaves tables to their owners: take 'interleaved'"
        )
    if schedule == "zero-bubble-v" and parallel.interleave != 2:
        found.append(
            f"parallel.interleave is {parallel.interleave}, but parallel.schedule = 'zero-bubble-v' is made for 2: "
            "leave it out, or take 'zero-bubble'"
        )
    if schedule == "1f1b" and microbatches < ranks:
        found.append(
            f"parallel.microbatches is {microbatches}, which parallel.schedule = '1f1b' cannot do with {ranks} "
            f"stages: make it {ranks} or more, or take 'gpipe'"
        )
    rounds = max(1, microbatches // ranks)
    if schedule in ("interleaved", "zero-bubble") and microbatches % rounds:
        found.append(
            f"parallel.microbatches is {microbatches}, which parallel.schedule = {schedule!r} cannot share "
            f"out over {ranks} ranks: make it {ranks * rounds} or {ranks * (rounds + 1)}"
        )
    return found


def buckets(parallel: Parallel, data: int) -> list[str]:
    if parallel.zero < 2 or data == 1 or parallel.bucket_mb == "auto":
        return []
    return [
        f"parallel.bucket_mb is {parallel.bucket_mb:g}, but with parallel.zero = {parallel.zero} a layer's gradients "
        "travel together, whatever their size: leave one of the two out"
    ]


def embeddings(parallel: Parallel) -> list[str]:
    if parallel.embeddings == "replicated" or not parallel.zero:
        return []
    return [
        f'parallel.embeddings = "{parallel.embeddings}" shares out tables, and so would '
        f"parallel.zero = {parallel.zero}; "
        "use zero = 0"
    ]


def batch_norm(ranks: int, data: int) -> list[str]:
    if data % ranks == 0:
        return []
    would = ", ".join(str(each) for each in range(1, data + 1) if data % each == 0)
    return [
        f"parallel.batch_norm is {ranks}, but {data} data-parallel ranks (parallel.data) do not make runs of so many; "
        f"one of {would} would do"
    ]


def sequence(parallel: Parallel) -> list[str]:
    if not parallel.sequence:
        return []
    if parallel.tensor == 1:
        return ["parallel.sequence is true, and parallel.tensor is 1: nothing is cut; use tensor = 2 or more"]
    if parallel.style == "alternating":
        return []
    return [
        f'parallel.sequence is true, and parallel.style is "{parallel.style}": the sequence is cut between pairs '
        'of layers; use style = "alternating"'
    ]


def rewind(recipe: Recipe) -> list[str]:
    if recipe.fault_tolerance.non_finite != "rewind" or recipe.checkpoint.every != "end":
        return []
    return ["fault_tolerance.non_finite is 'rewind', and there are no checkpoints to go back to: set checkpoint.every"]
