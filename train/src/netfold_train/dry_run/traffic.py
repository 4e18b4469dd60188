"""The collectives of a step, with their sizes and ranks: what the parts of `parallel` send, counted from shapes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from netfold_plan.shared_rules import bucket_ends
from netfold_train.dry_run.layers import Layer, Shape
from netfold_train.fault_tolerance.straggler import WINDOW_STEPS
from netfold_train.parallel.data_parallel import BUCKET_MB
from netfold_train.parallel.diloco import BUFFER_BYTES, in_fragments
from netfold_train.parallel.mesh import in_runs
from netfold_train.recipe import DiLoCo, Recipe
from netfold_train.recipe.split import SPLIT_BACKWARD, Split, stages_of

F32_BYTES = 4
F64_BYTES = I64_BYTES = 8
VOTE_NUMBERS = 5


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


def computed_bytes(recipe: Recipe) -> int:
    """Bytes of a weight or activation in a forward pass."""
    return F32_BYTES if recipe.training.precision == "f32" else 2


def stages_held(recipe: Recipe, split: Split, pipeline_rank: int) -> tuple[int, ...]:
    """The stages of a rank at this place of the pipeline."""
    return stages_of(pipeline_rank, split.pipeline, split.stages // split.pipeline, recipe.parallel.schedule)


def traffic(recipe: Recipe, split: Split, stages: Sequence[Sequence[Layer]], pipeline_rank: int) -> list[Traffic]:
    """The operations of a rank at this place of the pipeline. stages: all stages of the model, in order."""
    held = stages_held(recipe, split, pipeline_rank)
    layers = [layer for number in held for layer in stages[number]]
    found = [
        *_inside(layers, split),
        *_tables(recipe, layers, split),
        *_experts(recipe, layers, split),
        *_attention(layers, split),
        *_norms(recipe, layers, split),
        *_between(stages, held, split),
        *_replicas(recipe, [stages[number] for number in held], split),
        *_all(recipe, layers, split),
    ]
    return [each for each in found if each.calls and each.ranks > 1]


def _inside(layers: Sequence[Layer], split: Split) -> Iterator[Traffic]:
    """Collectives of tensor parallelism."""
    for of, passes in (
        ("activations", [layer.forward for layer in layers]),
        ("gradients of activations", [layer.backward for layer in layers]),
    ):
        sizes: dict[str, list[int]] = {}
        for each in passes:
            for call in each.collectives:
                sizes.setdefault(call.operation, []).append(int(call.size_bytes))
        for operation, each_size in sorted(sizes.items()):
            calls, total = len(each_size) * split.passes, sum(each_size) * split.passes
            yield Traffic("tensor", operation, of, split.tensor, calls, total)
    if summed := [size for layer in layers for size in layer.summed_bytes]:
        yield Traffic("tensor", "all_reduce", "gradients of norms", split.tensor, len(summed), sum(summed))


def _tables(recipe: Recipe, layers: Sequence[Layer], split: Split) -> Iterator[Traffic]:
    # Each sample reads one row of every table.
    tables = [table for layer in layers for table in layer.tables]
    if recipe.parallel.embeddings == "replicated" or not tables:
        return
    calls = split.passes * sum(1 for layer in layers if layer.tables)
    ids = split.samples * len(tables) * I64_BYTES * split.passes
    rows = split.samples * sum(width for _, width in tables) * computed_bytes(recipe) * split.passes
    if recipe.parallel.embeddings == "row_wise":
        # Only tables that are cut by rows need this: every rank reads equally many rows of a whole table.
        counts = split.data * len(tables) * I64_BYTES * split.passes
        yield Traffic("data", "all_to_all", "counts of rows", split.data, calls, counts)
    yield Traffic("data", "all_to_all", "numbers of rows", split.data, calls, ids)
    yield Traffic("data", "all_to_all", "rows of tables", split.data, calls, rows)
    yield Traffic("data", "all_to_all", "gradients of rows of tables", split.data, calls, rows)


def _experts(recipe: Recipe, layers: Sequence[Layer], split: Split) -> Iterator[Traffic]:
    # As if the router used all experts alike.
    routed = [each for layer in layers for each in layer.routed]
    if recipe.parallel.experts == "replicated":
        return
    counts = split.passes * sum(each.experts for each in routed) * I64_BYTES
    yield Traffic("data", "all_to_all", "numbers of tokens", split.data, split.passes * len(routed), counts)
    for of in ("tokens", "results of experts"):
        for text, made in ((of, routed), (f"gradients of {of}", [each for each in routed if not each.again])):
            tokens = split.passes * sum(each.size_bytes for each in made)
            yield Traffic("data", "all_to_all", text, split.data, split.passes * len(made), tokens)


def _attention(layers: Sequence[Layer], split: Split) -> Iterator[Traffic]:
    """Exchanges between ranks that share sequences; there are none otherwise."""
    sizes: dict[str, list[int]] = {}
    for each in (each for layer in layers for each in layer.attended):
        sizes.setdefault(each.of, []).append(each.size_bytes)
    for of, found in sizes.items():
        calls, size = split.passes * len(found), split.passes * sum(found)
        yield Traffic("data", "all_to_all", of, split.context, calls, size)


def _norms(recipe: Recipe, layers: Sequence[Layer], split: Split) -> Iterator[Traffic]:
    ranks, channels = recipe.parallel.batch_norm, [count for layer in layers for count in layer.norms]
    calls = len(channels) * split.passes
    # Forward: every rank's means, variances and count. Backward: two sums per channel.
    forward = sum(2 * count + 1 for count in channels) * ranks * F64_BYTES * split.passes
    backward = sum(2 * count for count in channels) * F64_BYTES * split.passes
    yield Traffic("data", "all_gather", "batch norm's statistics", ranks, calls, forward)
    yield Traffic("data", "all_reduce", "batch norm's gradients", ranks, calls, backward)


def _between(stages: Sequence[Sequence[Layer]], held: Sequence[int], split: Split) -> Iterator[Traffic]:
    """Messages between neighbouring stages of different ranks."""
    onward = [stages[number][-1] for number in held if number + 1 < len(stages) and number + 1 not in held]
    back = [stages[number - 1][-1] for number in held if number > 0 and number - 1 not in held]
    for of, sizes in (
        ("activations", [size for layer in onward for size in layer.handed_bytes]),
        ("gradients of activations", [size for layer in back for size in layer.handed_back_bytes]),
    ):
        yield Traffic("pipeline", "send", of, 2, len(sizes) * split.passes, sum(sizes) * split.passes)


def _replicas(recipe: Recipe, stages: Sequence[Sequence[Layer]], split: Split) -> Iterator[Traffic]:
    """Weights and gradients that ranks with the same stages exchange."""
    data, zero = split.data, recipe.parallel.zero
    layers = [layer for stage in stages for layer in stage]
    if recipe.diloco is not None:
        yield from _rounds(layers, data, recipe.diloco)
        # Of these ranks gradients are averaged in every step.
        data //= recipe.diloco.sites or data
    if zero:
        yield from _fsdp(recipe, layers, split)
        return
    # A split backward pass sends all gradients of a rank in one call, after the schedule.
    together = split.pipeline > 1 and recipe.parallel.schedule in SPLIT_BACKWARD
    owned = recipe.parallel
    if split.fsdp:
        # FSDP2 averages each layer by itself.
        sent = [sum(map(math.prod, shapes)) for layer in layers if (shapes := layer.shapes(owned=owned))]
        yield Traffic("data", "all_reduce", "gradients", data, len(sent), sum(sent) * F32_BYTES)
        return
    limit = (recipe.parallel.bucket_mb or BUCKET_MB) * 2**20
    sizes = [
        [math.prod(shape) * F32_BYTES for layer in stage for shape in layer.shapes(owned=owned)] for stage in stages
    ]
    calls = 1 if together else sum(len(bucket_ends(reversed(each), limit)) for each in sizes)
    total = sum(map(sum, sizes))
    yield Traffic("data", "all_reduce", "gradients", data, calls, total)


def _fsdp(recipe: Recipe, layers: Sequence[Layer], split: Split) -> Iterator[Traffic]:
    """FSDP2 gathers each layer's weights before the layer computes, and scatters its gradients after the last pass.

    A layer is one unit; each of its batch norms and routers, always f32, is its own unit if the layer computes in
    another type.
    """
    item = computed_bytes(recipe)
    units: list[tuple[int, list[Shape]]] = []
    for layer in layers:
        apart: list[list[Shape]] = []
        if item != F32_BYTES:
            apart += [[(count,), (count,)] for count in layer.norms]
            apart += map(list, layer.exact)
        shapes = layer.shapes(owned=recipe.parallel)
        for shape in itertools.chain(*apart):
            shapes.remove(shape)
        units.append((item, shapes))
        units += [(F32_BYTES, part) for part in apart]
    units = [(each, shapes) for each, shapes in units if shapes]
    # Rows are cut into equal runs; the last ones are padded.
    elements = [
        (each, sum(-(-shape[0] // split.data) * split.data * math.prod(shape[1:]) for shape in shapes))
        for each, shapes in units
    ]
    zero = recipe.parallel.zero
    if split.pipeline == 1:
        gathers = split.passes if zero < 3 else 2 * split.passes
    else:
        # The schedule keeps a backward pass's gathered weights until the next forward pass ends. So in any order, each
        # forward pass that follows a backward pass saves one gather.
        gathers = 1 if zero < 3 else split.passes + 1
    gathered, scattered = (sum(size * count for size, count in elements), sum(count for _, count in elements))
    yield Traffic("data", "all_gather", "weights", split.data, len(units) * gathers, gathered * gathers)
    yield Traffic("data", "reduce_scatter", "gradients", split.data, len(units), scattered * F32_BYTES)


def _rounds(layers: Sequence[Layer], data: int, diloco: DiLoCo) -> Iterator[Traffic]:
    """Weights in buffers, as parallel/diloco.py packs them, and batch norm's two statistics one by one."""
    sites, every = diloco.sites or data, diloco.every
    ranks = data // sites
    weights = [torch.empty(shape, device="meta") for layer in layers for shape in layer.shapes()]
    runs = [run for part in in_fragments(weights, diloco.fragments) for run in in_runs(part, BUFFER_BYTES)]
    # A site's ranks exchange equal parts.
    parts = sum(-(-sum(weight.numel() for weight in run) // ranks) * F32_BYTES for run in runs)
    norms = [count * F32_BYTES for layer in layers for count in layer.norms for _ in range(2)]
    yield Traffic("data", "all_reduce", "changes of weights", sites, len(runs), parts, every)
    yield Traffic("data", "all_gather", "mean changes of weights", ranks, len(runs), parts * ranks, every)
    yield Traffic("data", "all_reduce", "batch norm's statistics", data, len(norms), sum(norms), every)


def _all(recipe: Recipe, layers: Sequence[Layer], split: Split) -> Iterator[Traffic]:
    """Decisions and checks of the whole job, a few numbers each."""
    ranks, copy, every = split.ranks, split.pipeline * split.tensor, 1
    fsdp = split.fsdp
    # Under [diloco] the ranks of one site vote in every step, and all ranks once a round.
    island = ranks
    if recipe.diloco is not None:
        island, every = ranks // (recipe.diloco.sites or split.data), recipe.diloco.every
        # One loss per step, and three counts.
        yield Traffic("all", "all_reduce", "the vote of a round", ranks, 1, (every + 3) * F64_BYTES, every)
    yield Traffic("all", "all_reduce", "the step vote", island, 1, VOTE_NUMBERS * F64_BYTES)
    if split.data > 1:
        window = -(-WINDOW_STEPS // every) * every
        yield Traffic("all", "all_gather", "each rank's own time", ranks, 1, 2 * F64_BYTES * ranks, window)
    if recipe.fault_tolerance.missing_data == "skip":
        examples = split.batch // split.data * I64_BYTES
        yield Traffic("all", "all_reduce", "which examples cannot be read", copy, 1, examples)
    if recipe.training.precision == "f16":
        yield Traffic("all", "all_reduce", "whether gradients overflow", ranks, 1, 4)
        if recipe.parallel.zero and split.data > 1:
            # DTensor makes another one over the mesh of the first gradient.
            yield Traffic("data", "all_reduce", "whether gradients overflow", split.data, 1, 4)
    owned = any(layer.owned_parameters(recipe.parallel) for layer in layers)
    if recipe.training.clip is not None and (copy > 1 or fsdp or owned):
        yield Traffic("all", "all_reduce", "the gradients' norm", island, 1, F64_BYTES)
    if recipe.optimizer.name in ("lars", "lamb"):
        # Two norms per layer: of its weights, and of its gradient or its change.
        tables = sum(len(layer.tables) for layer in layers)
        cut = sum(layer.cut_matrices for layer in layers)
        by_rows = tables if recipe.parallel.embeddings == "row_wise" else 0
        if fsdp:
            by_rows = tables + sum(len(shape) > 1 for layer in layers for shape in layer.weights)
        for axis, size, count in (("data", split.data, by_rows), ("tensor", split.tensor, cut)):
            yield Traffic(axis, "all_reduce", "layers' norms", size, min(count, 1), 2 * count * F64_BYTES)
