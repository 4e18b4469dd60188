"""Which collective of what size runs where in a step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from netfold.train.explain.layers import Call, Layer
from netfold.train.explain.memory import F32_BYTES, computed_bytes
from netfold.train.recipe import Recipe
from netfold.train.split import Split, stages_held

# Where `bucket_mb` is to be found by trying: what the trials begin at.
AUTO_BUCKET_MB = 64.0


@dataclass(frozen=True)
class Traffic:
    """One kind of operation, of the ranks in one place of the pipeline, over a step."""

    axis: str
    operation: str
    of: str
    """What travels."""
    ranks: int
    """That take part in one."""
    calls: int
    """A step, of each rank."""
    bytes: int
    """A step, of all calls together: of whole tensors, as `netfold explain` takes sizes; sent, for send."""
    every: int = 1
    """Steps from one to the next."""


def traffic(recipe: Recipe, split: Split, stages: Sequence[Sequence[Layer]], pipeline_rank: int) -> list[Traffic]:
    """Of a rank at this place of the pipeline; `stages` are all of the model's, in order."""
    held = stages_held(split, pipeline_rank)
    layers = [layer for number in held for layer in stages[number]]
    passes = split.accumulate * split.microbatches
    found = _inside(layers, split, passes)
    found += _tables(recipe, layers, split, passes) + _norms(recipe, layers, passes)
    found += _between(stages, held, split, passes) + _replicas(recipe, layers, split, passes)
    if split.ranks > 1:
        found.append(Traffic("all", "all_reduce", "what all ranks must know", split.ranks, 1, 16))
    return found


def _inside(layers: Sequence[Layer], split: Split, passes: int) -> list[Traffic]:
    calls = sorted((call for layer in layers for call in layer.calls), key=_kind)
    return [
        Traffic(
            "tensor",
            operation,
            "gradients of activations" if backward else "activations",
            split.tensor,
            len(each) * passes,
            sum(call.bytes for call in each) * passes,
        )
        for (backward, operation), group in itertools.groupby(calls, _kind)
        for each in [list(group)]
    ]


def _kind(call: Call) -> tuple[bool, str]:
    return call.backward, call.operation


def _tables(recipe: Recipe, layers: Sequence[Layer], split: Split, passes: int) -> list[Traffic]:
    rows = sum(layer.looked_up_bytes for layer in layers) * passes * split.data
    if recipe.parallel.tables == "replicated" or split.data == 1 or not rows:
        return []
    return [
        Traffic("data", "all_to_all", of, split.data, passes, rows)
        for of in ("rows of tables", "gradients of rows of tables")
    ]


def _norms(recipe: Recipe, layers: Sequence[Layer], passes: int) -> list[Traffic]:
    channels = [count for layer in layers for count in layer.norms]
    if recipe.parallel.batch_norm == 1 or not channels:
        return []
    calls, ranks = len(channels) * passes, recipe.parallel.batch_norm
    # Forward every rank's means, variances and count; backward two sums a channel.
    forward = sum(2 * count + 1 for count in channels) * ranks * F32_BYTES * passes
    backward = sum(2 * count for count in channels) * F32_BYTES * passes
    return [
        Traffic("data", "all_gather", "batch norm's statistics", ranks, calls, forward),
        Traffic("data", "all_reduce", "batch norm's gradients", ranks, calls, backward),
    ]


def _between(stages: Sequence[Sequence[Layer]], held: Sequence[int], split: Split, passes: int) -> list[Traffic]:
    """What a rank's stages send to the next one and to the one before."""
    if split.pipeline == 1:
        return []
    on = [stages[number][-1].handed_bytes or 0 for number in held if number + 1 < len(stages)]
    back = [stages[number - 1][-1].handed_back_bytes or 0 for number in held if number > 0]
    return [
        Traffic("pipeline", "send", of, 2, len(sizes) * passes, sum(sizes) * passes)
        for of, sizes in (("activations", on), ("gradients of activations", back))
        if sizes
    ]


def _replicas(recipe: Recipe, layers: Sequence[Layer], split: Split, passes: int) -> list[Traffic]:
    """What ranks that hold the same layers do with weights and gradients."""
    if split.data == 1:
        return []
    shared = recipe.parallel.tables != "replicated"
    sizes = [layer.parameters - (layer.table_parameters if shared else 0) for layer in layers]
    size, count = sum(sizes) * computed_bytes(recipe), sum(1 for each in sizes if each)
    if recipe.outer is not None:
        weights = sum(sizes) * F32_BYTES
        return [Traffic("data", "all_reduce", "what was learnt", split.data, count, weights, recipe.outer.every)]
    zero, data = recipe.parallel.zero, split.data
    if zero >= 2:
        # Each layer by itself: its weights before it computes, its gradients after.
        gathers = 1 if zero == 2 else 2 * passes
        return [
            Traffic("data", "all_gather", "weights", data, count * gathers, size * gathers),
            Traffic("data", "reduce_scatter", "gradients", data, count, size),
        ]
    bucket = recipe.parallel.bucket_mb if recipe.parallel.bucket_mb != "auto" else AUTO_BUCKET_MB
    buckets = math.ceil(size / (bucket * 2**20))
    found = [Traffic("data", "all_reduce", "gradients", data, buckets, size)]
    if zero == 1:
        # From each rank, the weights whose state it has.
        found.append(Traffic("data", "broadcast", "weights", data, data, size))
    return found
