"""What a pipeline's schedule makes of ranks: how many stages, and which rank holds which. Arithmetic, without torch."""

from __future__ import annotations

from netfold.train.recipe import Parallel

SEVERAL_A_RANK = ("interleaved", "zero-bubble", "zero-bubble-v")
SPLIT_BACKWARD = ("zero-bubble", "zero-bubble-v")


def stages_a_rank(parallel: Parallel) -> int:
    return parallel.interleave if parallel.pipeline > 1 and parallel.schedule in SEVERAL_A_RANK else 1


def stages_of(rank: int, ranks: int, each: int, schedule: str) -> tuple[int, ...]:
    """Which stages a rank of the pipeline holds, of ranks x each: every ranks-th, or there and back again."""
    if schedule == "zero-bubble-v":
        return rank, 2 * ranks - 1 - rank
    return tuple(range(rank, ranks * each, ranks))
