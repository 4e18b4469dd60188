"""Which collective of what size runs where in a step: what the parts of `parallel` do, counted from shapes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from netfold.train.explain.layers import Call, Layer, Shape
from netfold.train.explain.memory import F32_BYTES, computed_bytes
from netfold.train.fault_tolerance.straggler import WINDOW_STEPS
from netfold.train.parallel.buckets import START_MB
from netfold.train.parallel.diloco import BUFFER_BYTES
from netfold.train.recipe import Recipe
from netfold.train.recipe.schedules import SPLIT_BACKWARD, stages_of
from netfold.train.recipe.split import Split

F64_BYTES = I64_BYTES = 8
VOTE_BYTES = 5 * F64_BYTES


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
    """A step, of all calls together: of whole tensors, as `netfold explain` takes sizes; of all_to_all and send, what a
    rank gives."""
    every: int = 1
    """Steps from one to the next."""


def traffic(recipe: Recipe, split: Split, stages: Sequence[Sequence[Layer]], pipeline_rank: int) -> list[Traffic]:
    """Of a rank at this place of the pipeline; `stages` are all of the model's, in order."""
    held = held_by(recipe, split, pipeline_rank)
    layers = [layer for number in held for layer in stages[number]]
    passes = split.accumulate * split.microbatches
    found = _inside(layers, split, passes)
    found += _tables(recipe, layers, split, passes) + _norms(recipe, layers, passes)
    found += _between(recipe, stages, held, split, passes)
    found += _replicas(recipe, [stages[number] for number in held], split, passes) + _all(recipe, layers, split)
    return [each for each in found if each.calls]


def held_by(recipe: Recipe, split: Split, pipeline_rank: int) -> tuple[int, ...]:
    """The stages of a rank at this place of the pipeline."""
    return stages_of(pipeline_rank, split.pipeline, split.stages // split.pipeline, recipe.parallel.schedule)


def buckets(sizes: Iterable[int], limit: float) -> int:
    """How many DDP makes of gradients of these bytes: the last one first, each bucket closed once it is full."""
    count, filled = 0, 0
    for size in reversed(list(sizes)):
        filled += size
        if filled >= limit:
            count, filled = count + 1, 0
    return count + (filled > 0)


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
    # Each sample asks once of every table.
    tables = [table for layer in layers for table in layer.tables]
    if recipe.parallel.embeddings == "replicated" or split.data == 1 or not tables:
        return []
    groups = passes * sum(1 for layer in layers if layer.tables)
    ids = split.samples * len(tables) * I64_BYTES * passes
    rows = split.samples * sum(width for _, width in tables) * computed_bytes(recipe) * passes
    found = [("numbers of rows", ids), ("rows of tables", rows), ("gradients of rows of tables", rows)]
    if recipe.parallel.embeddings == "row_wise":
        # How many are asked of whom: whole tables are asked equally often by all.
        found.insert(0, ("counts of rows", split.data * len(tables) * I64_BYTES * passes))
    return [Traffic("data", "all_to_all", of, split.data, groups, size) for of, size in found]


def _norms(recipe: Recipe, layers: Sequence[Layer], passes: int) -> list[Traffic]:
    channels = [count for layer in layers for count in layer.norms]
    if recipe.parallel.batch_norm == 1 or not channels:
        return []
    calls, ranks = len(channels) * passes, recipe.parallel.batch_norm
    # Forward every rank's means, variances and count; backward two sums a channel.
    forward = sum(2 * count + 1 for count in channels) * ranks * F64_BYTES * passes
    backward = sum(2 * count for count in channels) * F64_BYTES * passes
    return [
        Traffic("data", "all_gather", "batch norm's statistics", ranks, calls, forward),
        Traffic("data", "all_reduce", "batch norm's gradients", ranks, calls, backward),
    ]


def _between(
    recipe: Recipe, stages: Sequence[Sequence[Layer]], held: Sequence[int], split: Split, passes: int
) -> list[Traffic]:
    """What a rank's stages send to the next one and to the one before, where that is another rank's."""
    if split.pipeline == 1:
        return []
    on = [size for number in held if number + 1 < len(stages) and number + 1 not in held
          for size in stages[number][-1].handed_bytes]  # fmt: skip
    back = [size for number in held if number > 0 and number - 1 not in held
            for size in stages[number - 1][-1].handed_back_bytes]  # fmt: skip
    return [
        Traffic("pipeline", "send", of, 2, len(sizes) * passes, sum(sizes) * passes)
        for of, sizes in (("activations", on), ("gradients of activations", back))
    ]


def _replicas(recipe: Recipe, stages: Sequence[Sequence[Layer]], split: Split, passes: int) -> list[Traffic]:
    """What ranks that hold the same stages do with weights and gradients."""
    data, zero = split.data, recipe.parallel.zero
    if data == 1:
        return []
    layers = [layer for stage in stages for layer in stage]
    if recipe.diloco is not None:
        return _rounds(recipe, layers, data)
    if zero >= 2:
        return _fsdp(recipe, layers, split, passes)
    bucket_mb = START_MB if recipe.parallel.bucket_mb == "auto" else recipe.parallel.bucket_mb
    by_stage = [_gradients(recipe, stage) for stage in stages]
    if split.pipeline > 1 and recipe.parallel.schedule in SPLIT_BACKWARD:
        # All of a rank's, behind the schedule.
        calls = 1
    else:
        calls = sum(buckets(sizes, bucket_mb * 2**20) for sizes in by_stage)
    size = sum(each for sizes in by_stage for each in sizes)
    found = [Traffic("data", "all_reduce", "gradients", data, calls, size)]
    if zero == 1:
        # From each rank, the weights whose state it has.
        found.append(Traffic("data", "broadcast", "weights", data, data, size))
    return found


def _gradients(recipe: Recipe, layers: Sequence[Layer]) -> list[int]:
    """Bytes of each gradient that replicas share, f32."""
    units = (shapes for layer in layers for shapes, _ in _units(recipe, layer))
    return [math.prod(shape) * F32_BYTES for shapes in units for shape in shapes]


def _units(recipe: Recipe, layer: Layer) -> list[tuple[list[Shape], int]]:
    """(weights, bytes of an element) that FSDP2 gathers together: a layer's, and each batch norm's where that is of
    another kind."""
    shared_out = recipe.parallel.embeddings != "replicated"
    weights = [*layer.weights, *(() if shared_out else layer.tables)]
    norms: list[list[Shape]] = [[(count,), (count,)] for count in layer.norms]
    size = computed_bytes(recipe)
    if size == F32_BYTES:
        units = [([*weights, *itertools.chain(*norms)], size)]
    else:
        units = [(weights, size), *((norm, F32_BYTES) for norm in norms)]
    return [unit for unit in units if unit[0]]


def _fsdp(recipe: Recipe, layers: Sequence[Layer], split: Split, passes: int) -> list[Traffic]:
    """Each layer by itself: its weights before it computes, its gradients after the last pass."""
    units = [unit for layer in layers for unit in _units(recipe, layer)]
    # Rows are cut into equal runs, the last ones filled up.
    runs = [
        (-(-shape[0] // split.data) * split.data * math.prod(shape[1:]), each)
        for shapes, each in units
        for shape in shapes
    ]
    size = sum(count * each for count, each in runs)
    if split.pipeline == 1:
        gathers = passes if recipe.parallel.zero == 2 else 2 * passes
    else:
        # The schedule keeps what a backward pass has gathered until the next forward pass is through; so whatever the
        # order, one is saved each time that a forward pass follows a backward pass.
        gathers = 1 if recipe.parallel.zero == 2 else passes + 1
    return [
        Traffic("data", "all_gather", "weights", split.data, len(units) * gathers, size * gathers),
        Traffic(
            "data", "reduce_scatter", "gradients", split.data, len(units), sum(count for count, _ in runs) * F32_BYTES
        ),
    ]


def _rounds(recipe: Recipe, layers: Sequence[Layer], data: int) -> list[Traffic]:
    """Weights in buffers, as parallel/outer.py packs them, and batch norm's two statistics one by one."""
    assert recipe.diloco is not None
    sizes = _gradients(recipe, layers)
    runs, room = 0, 0
    for size in sizes:
        if size > room:
            runs, room = runs + 1, BUFFER_BYTES
        room -= size
    norms, every = (
        [count * F32_BYTES for layer in layers for count in layer.norms for _ in range(2)],
        recipe.diloco.every,
    )
    return [
        Traffic("data", "all_reduce", "what was learnt", data, runs, sum(sizes), every),
        Traffic("data", "all_reduce", "batch norm's statistics", data, len(norms), sum(norms), every),
    ]


def _all(recipe: Recipe, layers: Sequence[Layer], split: Split) -> list[Traffic]:
    """What the whole job must know, a few numbers each."""
    if split.ranks == 1:
        return []
    ranks, fsdp = split.ranks, recipe.parallel.zero >= 2 and split.data > 1
    # Ranks that train apart agree in every step among those that hold one copy of the model.
    every = 1 if recipe.diloco is None else recipe.diloco.every
    island = ranks if recipe.diloco is None else split.pipeline * split.tensor
    found = []
    if island > 1:
        found.append(Traffic("all", "all_reduce", "the word of all ranks", island, 1, VOTE_BYTES))
    if recipe.diloco is not None:
        # A loss a step, and three counts.
        found.append(Traffic("all", "all_reduce", "the word of a round", ranks, 1, (every + 3) * F64_BYTES, every))
    if split.data > 1:
        window = -(-WINDOW_STEPS // every) * every
        found.append(Traffic("all", "all_gather", "each rank's own time", ranks, 1, 2 * F64_BYTES * ranks, window))
    copy = split.pipeline * split.tensor
    if recipe.fault_tolerance.missing_data == "skip" and copy > 1:
        size = split.batch // split.data * I64_BYTES
        found.append(Traffic("all", "all_reduce", "which examples cannot be read", copy, 1, size))
    if recipe.training.precision == "f16":
        found.append(Traffic("all", "all_reduce", "whether gradients overflow", ranks, 1, 4))
    parts = split.pipeline * split.tensor > 1 or fsdp
    parts |= recipe.parallel.embeddings != "replicated" and split.data > 1
    if recipe.training.clip is not None and parts:
        found.append(Traffic("all", "all_reduce", "the gradients' norm", island, 1, F64_BYTES))
    if recipe.optimizer.name in ("lars", "lamb"):
        # Of each layer two: its weights', and its gradient's or its change's.
        matrices = sum(len(shape) > 1 for layer in layers for shape in layer.weights)
        tables = sum(len(layer.tables) for layer in layers)
        by_rows = tables if recipe.parallel.embeddings == "row_wise" else 0
        for axis, size, count in (
            ("data", split.data, matrices + tables if fsdp else by_rows),
            ("tensor", split.tensor, sum(layer.cut_matrices for layer in layers)),
        ):
            if count and size > 1:
                found.append(Traffic(axis, "all_reduce", "layers' norms", size, 1, 2 * count * F64_BYTES))
    return found
