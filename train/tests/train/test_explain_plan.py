"""The plan's numbers against numbers found by hand."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from made import needs_fashion_mnist
from own_parts import squares
from ranks import run_ranks, values
from rich.console import Console
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
)

from netfold_plan.shared_rules import bucket_ends
from netfold_train import Batch, Chain, Model, Recipe
from netfold_train.dry_run.explain import Plan, a_parameter, explain, passes_kept
from netfold_train.dry_run.layers import Layer, measure
from netfold_train.dry_run.render import print_plan
from netfold_train.dry_run.traffic import Traffic, traffic
from netfold_train.dry_run.validate import validate_recipe
from netfold_train.parallel.embeddings import Embeddings
from netfold_train.recipe.load import load
from netfold_train.recipe.split import Split, ranks_asked, split

OWN: dict[str, Any] = {
    "model": {"name": "own_parts:line"},
    "data": {"name": "own_parts:numbers"},
    "training": {"steps": 2, "batch": 16},
}


def recipe(**sections: dict[str, Any]) -> Recipe:
    tables = {name: {**OWN.get(name, {}), **sections.get(name, {})} for name in {*OWN, *sections}}
    return Recipe.model_validate(tables)


def plan(ranks: int, **sections: dict[str, Any]) -> Plan:
    asked = recipe(**sections)
    return explain(asked, validate_recipe(asked, ranks))


def test_bytes_per_parameter_equal_those_of_ddp_and_fsdp2() -> None:
    # Adam in mixed precision: 16, 4 + 12/d, 2 + 14/d, 16/d (Rajbhandari et al. 2020, figure 1); here gradients are f32,
    # which is 2 more. ZeRO 1 is ZeRO 2, and FSDP2 keeps no lower copies between steps.
    for zero, expected in enumerate([18, 2 + 16 / 4, 2 + 16 / 4, 16 / 4]):
        asked = recipe(training={"precision": "bf16"}, optimizer={"name": "adam"}, parallel={"zero": zero})
        assert a_parameter(asked, 4).total == expected
    f32 = [a_parameter(recipe(optimizer={"name": "lamb"}, parallel={"zero": zero}), 4).total for zero in range(4)]
    assert f32 == [16, 4 + 16 / 4, 4 + 16 / 4, 16 / 4]
    assert a_parameter(recipe(optimizer={"name": "sgd"}), 1).optimizer == 4
    assert a_parameter(recipe(optimizer={"name": "sgd", "momentum": 0.0}), 1).optimizer == 0
    assert a_parameter(recipe(diloco={"every": 5}), 1).optimizer == 8 + 8
    # One fragment of two is under way, twice; every rank is a site, and holds all its rounding errors.
    streaming = {"every": 5, "fragments": 2, "overlap": 1, "wire": "i8"}
    assert a_parameter(recipe(diloco=streaming), 4).optimizer == 8 + 8 + 4 + 4
    assert a_parameter(recipe(diloco={**streaming, "overlap": 3, "sites": 2}), 4).optimizer == 8 + 8 + 8 + 2
    # lab/bench/results/train_memory.md: the larger of the bytes between steps, and at the end of a forward pass.
    for data, zero, measured in ((2, 1, 8), (2, 2, 8), (2, 3, 8), (4, 2, 5), (4, 3, 4)):
        asked = recipe(training={"precision": "bf16"}, optimizer={"name": "adamw"}, parallel={"zero": zero})
        # Under ZeRO 1 and 2 gathered weights go while gradients come.
        assert a_parameter(asked, data).total == measured + (4 / data if zero < 3 else 0)
    assert a_parameter(recipe(parallel={"zero": 3}), 1) == a_parameter(recipe(), 1)


@pytest.mark.parametrize(
    ("schedule", "microbatches", "kept"),
    [
        # For the first, second, third and last of four stages.
        ("gpipe", 8, [8, 8, 8, 8]),
        ("1f1b", 8, [4, 3, 2, 1]),
        # Two stages per rank: 4 passes through the first stages, then two for each later rank, and one more.
        ("interleaved", 8, [11, 9, 7, 5]),
        ("interleaved", 4, [8, 8, 7, 5]),
        # Two stages per rank, four microbatches.
        ("zero-bubble-v", 8, [8, 8, 8, 8]),
        ("zero-bubble-v", 2, [4, 4, 4, 4]),
    ],
)
def test_the_number_of_passes_before_their_backward_pass(schedule: str, microbatches: int, kept: list[int]) -> None:
    asked = recipe(parallel={"pipeline": 4, "schedule": schedule, "microbatches": microbatches})
    shares = split(asked, 4)
    assert [passes_kept(asked, shares, rank) for rank in range(4)] == kept
    alone = recipe()
    assert passes_kept(alone, split(alone, 1), 0) == 1


def test_buckets_are_closed_once_they_are_full() -> None:
    assert [bucket_ends([10, 10, 10, 40], limit) for limit in (100, 30, 25, 10)] == [[4], [3, 4], [3, 4], [1, 2, 3, 4]]
    assert bucket_ends([10, 10, 40], 30, first_limit=5) == [1, 3] and bucket_ends([], 1) == []


def test_two_data_parallel_ranks_against_numbers_found_by_hand() -> None:
    found = plan(2, parallel={"data": 2}, optimizer={"name": "adam"})
    # Two layers of 4 x 4 + 4 parameters, and the last of 4 + 1.
    assert found.parameters == 45 and not found.unknown
    (place,) = found.places
    assert place.ranks == (0, 1) and place.stages == (("layer0", "layer1", "last"),) and place.parameters == 45
    memory = place.memory
    assert (memory.weights, memory.gradients, memory.optimizer) == (180, 180, 360)
    # 8 samples per rank: each layer keeps its input, 4 numbers per sample, and the loss an output and a target.
    assert memory.activations == 3 * 8 * 16 + 2 * 8 * 4
    assert place.traffic == (
        Traffic("data", "all_reduce", "gradients", 2, 1, 180),
        Traffic("all", "all_reduce", "the step vote", 2, 1, 40),
        Traffic("all", "all_gather", "each rank's own time", 2, 1, 32, 20),
    )


def test_a_pipeline_against_numbers_found_by_hand() -> None:
    found = plan(2, parallel={"pipeline": 2, "microbatches": 4})
    first, last = found.places
    assert (first.ranks, first.stages, first.parameters) == ((0,), (("layer0",),), 20)
    assert (last.ranks, last.stages, last.parameters) == ((1,), (("layer1", "last"),), 25)
    # 4 samples per microbatch, 4 numbers of 4 bytes each; 1F1B keeps two passes at the first stage, one at the last.
    assert first.memory.activations == 2 * 64 and last.memory.activations == 2 * 64 + 2 * 16
    assert first.traffic[0] == Traffic("pipeline", "send", "activations", 2, 4, 4 * 64)
    assert last.traffic[0] == Traffic("pipeline", "send", "gradients of activations", 2, 4, 4 * 64)


def test_interleaved_stages_send_around_the_ring_of_ranks() -> None:
    parallel = {"pipeline": 2, "schedule": "interleaved", "microbatches": 4}
    found = plan(2, model={"layers": 4}, parallel=parallel)
    assert [place.stages for place in found.places] == [(("layer0",), ("layer2",)), (("layer1",), ("last",))]
    sent = [[(each.of, each.calls) for each in place.traffic if each.axis == "pipeline"] for place in found.places]
    assert sent == [
        [("activations", 8), ("gradients of activations", 4)],
        [("activations", 4), ("gradients of activations", 8)],
    ]


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        # Each rank has equally many rows: the last layer's single row is padded to two.
        ({"parallel": {"zero": 1}}, [("all_gather", 3, 200), ("reduce_scatter", 3, 200)]),
        ({"parallel": {"zero": 2}}, [("all_gather", 3, 200), ("reduce_scatter", 3, 200)]),
        # Gathered twice for each of four parts: before the forward pass, and before the backward pass.
        (
            {"parallel": {"zero": 3}, "training": {"accumulate": 4}},
            [("all_gather", 24, 8 * 200), ("reduce_scatter", 3, 200)],
        ),
        ({"training": {"precision": "bf16"}}, [("all_reduce", 1, 180)]),
        # Buckets of 64 bytes: the last layer and the one before it, then the first layer.
        ({"parallel": {"bucket_mb": 64 / 2**20}}, [("all_reduce", 2, 180)]),
        ({"diloco": {"every": 10}}, [("all_reduce", 1, 180)]),
        ({"diloco": {"every": 10, "fragments": 2, "overlap": 3}}, [("all_reduce", 2, 180)]),
    ],
)
def test_ranks_with_the_same_layers_exchange_gradients(
    sections: dict[str, dict[str, Any]], expected: list[tuple[str, int, int]]
) -> None:
    sections = {**sections, "parallel": {"data": 2, **sections.get("parallel", {})}}
    (place,) = plan(2, **sections).places
    found = [each for each in place.traffic if each.axis == "data"]
    assert [(each.operation, each.calls, each.bytes) for each in found] == expected
    assert all(each.every == (10 if "diloco" in sections else 1) for each in found)


def test_the_ranks_of_a_site_average_gradients_and_exchange_a_part_each() -> None:
    (place,) = plan(4, parallel={"data": 4}, diloco={"every": 10, "sites": 2}).places
    found = [each for each in place.traffic if each.axis == "data"]
    # 45 numbers: 23 for each of two ranks.
    assert [(each.operation, each.ranks, each.calls, each.bytes, each.every) for each in found] == [
        ("all_reduce", 2, 1, 92, 10),
        ("all_gather", 2, 1, 184, 10),
        ("all_reduce", 2, 1, 180, 1),
    ]
    votes = [(each.of, each.ranks, each.every) for each in place.traffic if "vote" in each.of]
    assert votes == [("the vote of a round", 4, 10), ("the step vote", 2, 1)]


def test_tables_and_batch_norm_against_numbers_found_by_hand() -> None:
    asked = recipe(parallel={"data": 4, "embeddings": "row_wise", "batch_norm": 2})
    # 4 samples per rank read rows of 8 numbers from two tables; one norm has 3 channels.
    layer = Layer("tables", ((5, 2),), (3,), ((100, 8), (25, 8)))
    assert (layer.parameters, layer.owned_parameters(asked.parallel)) == (1016, 1000)
    found = traffic(asked, Split(1, 4, 1, 1, 1, 1, 16, False), [[layer]], 0)
    assert found[:7] == [
        Traffic("data", "all_to_all", "counts of rows", 4, 1, 4 * 2 * 8),
        Traffic("data", "all_to_all", "numbers of rows", 4, 1, 4 * 2 * 8),
        Traffic("data", "all_to_all", "rows of tables", 4, 1, 4 * 2 * 8 * 4),
        Traffic("data", "all_to_all", "gradients of rows of tables", 4, 1, 4 * 2 * 8 * 4),
        # Each of 2 ranks sends 2 x 3 numbers and a count, in f64; backward 2 x 3 sums.
        Traffic("data", "all_gather", "batch norm's statistics", 2, 1, 112),
        Traffic("data", "all_reduce", "batch norm's gradients", 2, 1, 48),
        Traffic("data", "all_reduce", "gradients", 4, 1, 64),
    ]


def test_tables_and_norms_are_found_in_a_model() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables, self.norm, self.linear = Embeddings([10, 6], 4), nn.BatchNorm1d(2), nn.Linear(8, 4)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.linear(self.norm(self.tables(rows)).flatten(1))

    fake = FakeTensorMode()
    with fake:
        model = Model(Wide(), squares)
    (layer,), why = measure(model, fake, Batch((torch.zeros(2, 2, dtype=torch.long),), torch.zeros(2, 4)), samples=6)
    assert not why and (layer.weights, layer.norms, layer.tables) == (((4, 8), (4,)), (2,), ((10, 4), (6, 4)))
    # A multiplication and an addition for each weight and sample: forward, and twice backward.
    assert layer.operations == 2 * 3 * 6 * 32


def test_a_model_that_fake_tensors_cannot_run_is_shown_as_unknown() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * float(x.sum())

    fake = FakeTensorMode()
    with fake:
        model = Model(Odd(), squares)
    (layer,), why = measure(model, fake, Batch((torch.zeros(2, 4),), torch.zeros(2, 1)), samples=6)
    assert why.startswith("a pass of fake tensors failed: DataDependentOutputException")
    assert (layer.parameters, layer.saved_bytes) == (5, None)


# The cut of transformers along the sequence: gathered before a pair of layers, scattered after it.
SEQUENCE = {
    "layers.layer0": ColwiseParallel(input_layouts=Shard(1)),
    "layers.layer1": RowwiseParallel(output_layouts=Shard(1)),
}
# 16 samples x 4 of a sequence x 8 numbers of 4 bytes.
WHOLE = 16 * 4 * 8 * 4


@pytest.mark.parametrize(
    ("styles", "expected"),
    [
        # Row-wise, then column-wise: one all_reduce forward and one backward for both, and none for the first input.
        (
            {"layers.layer1": ColwiseParallel(), "layers.layer2": RowwiseParallel()},
            [("all_reduce", WHOLE, True), ("all_reduce", WHOLE, False)],
        ),
        (
            {f"layers.layer{n}": RowwiseParallel(input_layouts=Replicate()) for n in (1, 2)},
            [("all_reduce", WHOLE, False), ("all_gather", WHOLE, True)] * 2,
        ),
        (
            {f"layers.layer{n}": ColwiseParallel(output_layouts=Replicate()) for n in (1, 2)},
            [("all_gather", WHOLE, False), ("all_reduce", WHOLE, True)] * 2,
        ),
        # The input is prepared once per layer, where its gradient is summed.
        (
            {
                "layers.layer1": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
                "layers.layer1.0": ColwiseParallel(),
                "layers.layer1.1": RowwiseParallel(),
            },
            [("all_reduce", WHOLE, False), ("all_reduce", WHOLE, True)],
        ),
        # A rank has half of the sequence, so a gathered tensor is twice as large.
        (
            SEQUENCE,
            [("all_gather", 2 * WHOLE, False), ("reduce_scatter", 2 * WHOLE, False), ("all_gather", 2 * WHOLE, True)],
        ),
    ],
)
def test_collectives_of_tensor_parallelism_are_counted(
    styles: dict[str, Any], expected: list[tuple[str, int, bool]]
) -> None:
    # In a separate process: torch caches results for a mesh, with the names of groups that no longer exist.
    values(run_ranks(_counted, 1, styles, expected))


def _counted(rank: int, size: int, folder: str, styles: dict[str, Any], expected: list[tuple[str, int, bool]]) -> None:
    fake, example = FakeTensorMode(), Batch((torch.zeros(2, 4, 8),), torch.zeros(2, 4, 8))
    with fake:
        layers: list[tuple[str, nn.Module]] = [(f"layer{n}", nn.Linear(8, 8)) for n in range(4)]
        if "layers.layer1.0" in styles:
            layers[1] = ("layer1", nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
        model = Model(Chain(layers), squares)
    measured, why = measure(model, fake, example, samples=16, tensor=2, styles=styles)
    calls = [
        (call.operation, call.size_bytes, is_backward)
        for layer in measured
        for is_backward, made in enumerate((layer.forward, layer.backward))
        for call in made.collectives
    ]
    assert not why and calls == expected
    # A rank has half of each cut tensor, and whole biases that are added once.
    rows = sum(isinstance(style, ColwiseParallel) for style in styles.values())
    columns = sum(isinstance(style, RowwiseParallel) for style in styles.values())
    linears = 5 if "layers.layer1.0" in styles else 4
    assert sum(layer.parameters for layer in measured) == (linears - rows - columns) * 72 + rows * 36 + columns * 40
    assert not dist.is_initialized()


def test_a_rank_keeps_only_its_part() -> None:
    fake, example = FakeTensorMode(), Batch((torch.zeros(2, 8),), torch.zeros(2, 8))
    found = []
    for tensor, precision in ((1, "f32"), (2, "f32"), (1, "bf16")):
        with fake:
            pair = [("up", nn.Linear(8, 32)), ("down", nn.Linear(32, 8))]
            model = Model(Chain(pair), squares)
        styles = {"layers.up": ColwiseParallel(), "layers.down": RowwiseParallel()}
        layers, why = measure(model, fake, example, samples=4, tensor=tensor, styles=styles, precision=precision)
        assert not why
        found.append([layer.saved_bytes for layer in layers])
    # 4 samples: the input of 8; the hidden 32, or a rank's 16; output and target of the loss.
    assert found[:2] == [[4 * 8 * 4, 4 * 32 * 4 + 2 * 4 * 8 * 4], [4 * 8 * 4, 4 * 16 * 4 + 2 * 4 * 8 * 4]]
    # Half as much in bf16, except for the loss and its target, which are f32.
    assert found[2][0] == 4 * 8 * 2


def shown(found: Plan) -> str:
    console = Console(file=io.StringIO(), width=80)
    print_plan(found, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_plan_is_printed() -> None:
    parallel = {"pipeline": 2, "data": 2, "tensor": 2}
    text = shown(plan(8, model={"planned": True, "layers": 4}, parallel=parallel))
    assert "8 ranks = pipeline 2 x data 2 x tensor 2; batch 16 = 2 data-parallel x 8 samples, in 2 microbatches" in text
    assert "rank = (index in pipeline x 2 + index in data) x 2 + index in tensor" in text
    assert "│ 4-7" in text and "layer0" in text and "the step vote" in text and "40 bytes" in text
    alone = shown(plan(1))
    assert "1 rank = pipeline 1" in alone and "messages" not in alone


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, id=file.stem, marks=[needs_fashion_mnist] if "fashion-mnist" in file.read_text() else [])
        for file in sorted((Path(__file__).parents[3] / "train/src/netfold_train/recipes").glob("*.toml"))
    ],
)
def test_every_shipped_recipe_has_a_plan(file: Path) -> None:
    asked, _ = load(file)
    found = explain(asked, validate_recipe(asked, ranks_asked(asked.parallel)))
    assert not found.unknown
    assert ("the step vote" if asked.diloco is None else "the vote of a round") in shown(found)
