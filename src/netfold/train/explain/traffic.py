"""The collectives of a step, with their sizes and ranks: what the parts of `parallel` send, counted from shapes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from netfold.plan.shared_rules import bucket_ends
from netfold.train.explain.layers import Call, Layer, Shape
from netfold.train.explain.memory import F32_BYTES, computed_bytes
from netfold.train.fault_tolerance.straggler import WINDOW_STEPS
from netfold.train.parallel.data_parallel import BUCKET_MB
from netfold.train.parallel.diloco import BUFFER_BYTES
from netfold.train.recipe import Recipe
from netfold.train.recipe.split import SPLIT_BACKWARD, Split, stages_of

F64_BYTES = I64_BYTES = 8
VOTE_BYTES = 5 * F64_BYTES


@dataclass(frozen=True)
class Traffic:
    """One kind of operation in a step, of the ranks in one place of the pipeline."""

    axis: str
    operation: str
    of: str
    """The data that is sent, in words."""
    ranks: int
    """Ranks of one operation."""
    calls: int
    """Calls of each rank in a step."""
    bytes: int
    """Bytes of all calls of a step: of whole tensors, like the sizes of `netfold explain`. For all_to_all and send:
    bytes that a rank sends."""
    every: int = 1
    """Steps between two such operations."""


def traffic(recipe: Recipe, split: Split, stages: Sequence[Sequence[Layer]], pipeline_rank: int) -> list[Traffic]:
    """The operations of a rank at this place of the pipeline. stages: all stages of the model, in order."""
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
    # Each sample reads one row of every table.
    tables = [table for layer in layers for table in layer.tables]
    if recipe.parallel.embeddings == "replicated" or split.data == 1 or not tables:
        return []
    groups = passes * sum(1 for layer in layers if layer.tables)
    ids = split.samples * len(tables) * I64_BYTES * passes
    rows = split.samples * sum(width for _, width in tables) * computed_bytes(recipe) * passes
    found = [("numbers of rows", ids), ("rows of tables", rows), ("gradients of rows of tables", rows)]
    if recipe.parallel.embeddings == "row_wise":
        # Only tables that are cut by rows need this: every rank reads equally many rows of a whole table.
        found.insert(0, ("counts of rows", split.data * len(tables) * I64_BYTES * passes))
    return [Traffic("data", "all_to_all", of, split.data, groups, size) for of, size in found]


def _norms(recipe: Recipe, layers: Sequence[Layer], passes: int) -> list[Traffic]:
    channels = [count for layer in layers for count in layer.norms]
    if recipe.parallel.batch_norm == 1 or not channels:
        return []
    calls, ranks = len(channels) * passes, recipe.parallel.batch_norm
    # Forward: every rank's means, variances and count. Backward: two sums per channel.
    forward = sum(2 * count + 1 for count in channels) * ranks * F64_BYTES * passes
    backward = sum(2 * count for count in channels) * F64_BYTES * passes
    return [
        Traffic("data", "all_gather", "batch norm's statistics", ranks, calls, forward),
        Traffic("data", "all_reduce", "batch norm's gradients", ranks, calls, backward),
    ]


def _between(
    recipe: Recipe, stages: Sequence[Sequence[Layer]], held: Sequence[int], split: Split, passes: int
) -> list[Traffic]:
    """Messages between neighbouring stages of different ranks."""
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
    """Weights and gradients that ranks with the same stages exchange."""
    data, zero = split.data, recipe.parallel.zero
    if data == 1:
        return []
    layers = [layer for stage in stages for layer in stage]
    if recipe.diloco is not None:
        return _rounds(recipe, layers, data)
    if zero:
        return _fsdp(recipe, layers, split, passes)
    limit = (recipe.parallel.bucket_mb or BUCKET_MB) * 2**20
    by_stage = [_gradients(recipe, stage) for stage in stages]
    if split.pipeline > 1 and recipe.parallel.schedule in SPLIT_BACKWARD:
        # All gradients of a rank in one call, after the schedule.
        calls = 1
    else:
        calls = sum(len(bucket_ends(reversed(sizes), limit)) for sizes in by_stage)
    size = sum(each for sizes in by_stage for each in sizes)
    return [Traffic("data", "all_reduce", "gradients", data, calls, size)]


def _gradients(recipe: Recipe, layers: Sequence[Layer]) -> list[int]:
    """Bytes of each gradient that data-parallel ranks average, f32."""
    units = (shapes for layer in layers for shapes, _ in _units(recipe, layer))
    return [math.prod(shape) * F32_BYTES for shapes in units for shape in shapes]


def _units(recipe: Recipe, layer: Layer) -> list[tuple[list[Shape], int]]:
    """(shapes, bytes of an element) of weights that FSDP2 gathers together.

    A layer is one unit; each batch norm is its own unit if its dtype differs.
    """
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
    """FSDP2 gathers each layer's weights before the layer computes, and scatters its gradients after the last pass."""
    units = [unit for layer in layers for unit in _units(recipe, layer)]
    # Rows are cut into equal runs; the last ones are padded.
    runs = [
        (-(-shape[0] // split.data) * split.data * math.prod(shape[1:]), each)
        for shapes, each in units
        for shape in shapes
    ]
    size = sum(count * each for count, each in runs)
    if split.pipeline == 1:
        gathers = passes if recipe.parallel.zero < 3 else 2 * passes
    else:
        # The schedule keeps a backward pass's gathered weights until the next forward pass ends. So in any order, each
        # forward pass that follows a backward pass saves one gather.
        gathers = 1 if recipe.parallel.zero < 3 else passes + 1
    return [
        Traffic("data", "all_gather", "weights", split.data, len(units) * gathers, size * gathers),
        Traffic(
            "data", "reduce_scatter", "gradients", split.data, len(units), sum(count for count, _ in runs) * F32_BYTES
        ),
    ]


def _rounds(recipe: Recipe, layers: Sequence[Layer], data: int) -> list[Traffic]:
    """Weights in buffers, as parallel/diloco.py packs them, and batch norm's two statistics one by one."""
    assert recipe.diloco is not None
    sizes = _gradients(recipe, layers)
    runs, left = 0, 0
    for size in sizes:
        if size > left:
            runs, left = runs + 1, BUFFER_BYTES
        left -= size
    norms = [count * F32_BYTES for layer in layers for count in layer.norms for _ in range(2)]
    every = recipe.diloco.every
    return [
        Traffic("data", "all_reduce", "changes of weights", data, runs, sum(sizes), every),
        Traffic("data", "all_reduce", "batch norm's statistics", data, len(norms), sum(norms), every),
    ]


def _all(recipe: Recipe, layers: Sequence[Layer], split: Split) -> list[Traffic]:
    """Decisions and checks of the whole job, a few numbers each."""
    if split.ranks == 1:
        return []
    ranks, fsdp = split.ranks, recipe.parallel.zero > 0 and split.data > 1
    # Under [diloco] the ranks of one copy of the model vote in every step, and all ranks once a round.
    every = 1 if recipe.diloco is None else recipe.diloco.every
    island = ranks if recipe.diloco is None else split.pipeline * split.tensor
    found = []
    if island > 1:
        found.append(Traffic("all", "all_reduce", "the step vote", island, 1, VOTE_BYTES))
    if recipe.diloco is not None:
        # One loss per step, and three counts.
        found.append(Traffic("all", "all_reduce", "the vote of a round", ranks, 1, (every + 3) * F64_BYTES, every))
    if split.data > 1:
        window = -(-WINDOW_STEPS // every) * every
        found.append(Traffic("all", "all_gather", "each rank's own time", ranks, 1, 2 * F64_BYTES * ranks, window))
    copy = split.pipeline * split.tensor
    if recipe.fault_tolerance.missing_data == "skip" and copy > 1:
        size = split.batch // split.data * I64_BYTES
        found.append(Traffic("all", "all_reduce", "which examples cannot be read", copy, 1, size))
    if recipe.training.precision == "f16":
        found.append(Traffic("all", "all_reduce", "whether gradients overflow", ranks, 1, 4))
        if fsdp:
            # DTensor makes another one over the mesh of the first gradient.
            found.append(Traffic("data", "all_reduce", "whether gradients overflow", split.data, 1, 4))
    parts = split.pipeline * split.tensor > 1 or fsdp
    parts |= recipe.parallel.embeddings != "replicated" and split.data > 1
    if recipe.training.clip is not None and parts:
        found.append(Traffic("all", "all_reduce", "the gradients' norm", island, 1, F64_BYTES))
    if recipe.optimizer.name in ("lars", "lamb"):
        # Two norms per layer: of its weights, and of its gradient or its change.
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
