"""The calls and bytes that a plan predicts for a step, against those that the engine recorded."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
from ranks import run_ranks, values
from training import TINY_GPT, Table, changed

RANKS = 4
GPT = changed(
    TINY_GPT, model={"width": 16, "heads": 2, "layers": 2, "context": 16}, data={"context": 16}, training={"steps": 3}
)
DLRM: Table = {
    "model": {"name": "dlrm", "numbers": 8, "rows": [17, 4, 105, 13, 8, 20], "width": 4},
    "data": {"name": "flights"},
    "training": {"steps": 3, "batch": 16},
    "optimizer": {"name": "sgd", "lr": 0.1},
}
MOE = changed(GPT, model={"name": "gpt-moe", "experts": 3, "mlp": 2})
BLOCKS = ("all_gather", "reduce_scatter", "all_to_all")
# 0.01 MB makes several buckets.
RECIPES: dict[str, Table] = {
    "data": changed(GPT, training={"accumulate": 2, "clip": 1.0}, parallel={"bucket_mb": 0.01}),
    "zero 1 in bf16": changed(GPT, training={"precision": "bf16"}, parallel={"zero": 1}),
    "zero 3 in f16": changed(GPT, training={"precision": "f16"}, parallel={"zero": 3}),
    "zero 2": changed(GPT, training={"accumulate": 2}, parallel={"zero": 2}),
    "zero 3 of lars, tensor": changed(
        GPT, training={"accumulate": 2, "clip": 1.0}, optimizer={"name": "lars"}, parallel={"zero": 3, "tensor": 2}
    ),
    "tensor": changed(GPT, training={"precision": "f16", "clip": 1.0}, parallel={"tensor": 2, "style": "colwise"}),
    "zero 1 of lamb, tensor": changed(GPT, optimizer={"name": "lamb"}, parallel={"zero": 1, "tensor": 2}),
    "sequence in stages": changed(GPT, parallel={"tensor": 2, "sequence": True, "pipeline": 2}),
    "zero 3 in stages": changed(GPT, parallel={"zero": 3, "pipeline": 2, "microbatches": 4}),
    "there and back": changed(GPT, parallel={"pipeline": 2, "schedule": "zero-bubble-v", "microbatches": 4}),
    "context": changed(GPT, training={"accumulate": 2}, parallel={"context": 2}),
    "context, recomputed": changed(GPT, training={"recompute": "all"}, parallel={"context": 2}),
    "context in stages, recomputed": changed(
        GPT, training={"recompute": "selective"}, parallel={"context": 2, "pipeline": 2}
    ),
    "tensor, recomputed": changed(GPT, training={"recompute": "all"}, parallel={"tensor": 2}),
    "zero 3, recomputed": changed(GPT, training={"recompute": "all"}, parallel={"zero": 3}),
    "experts, recomputed": changed(MOE, training={"recompute": "all"}, parallel={"experts": "sharded"}),
    "experts": changed(MOE, training={"accumulate": 2, "clip": 1.0}, parallel={"experts": "sharded"}),
    "experts, zero 3 in bf16": changed(MOE, training={"precision": "bf16"}, parallel={"experts": "sharded", "zero": 3}),
    "rows of tables, lars": changed(DLRM, optimizer={"name": "lars"}, parallel={"embeddings": "row_wise"}),
}
Found = dict[tuple[str, int], tuple[int, int]]


@functools.cache
def plan(name: str) -> Any:
    from netfold_train import Recipe
    from netfold_train.dry_run.explain import explain
    from netfold_train.dry_run.validate import validate_recipe

    recipe = Recipe.model_validate(RECIPES[name])
    return explain(recipe, validate_recipe(recipe, RANKS))


@functools.cache
def recorded() -> list[dict[str, Found]]:
    """[rank][recipe]. Stages are cut at the places of the plan."""
    bounds = {}
    for name in RECIPES:
        places = plan(name).places
        lengths = {}
        for rank, place in enumerate(places):
            count = len(place.stages) * len(places)
            turn = (rank, count - 1 - rank) if name == "there and back" else range(rank, count, len(places))
            lengths.update({stage: len(names) for stage, names in zip(turn, place.stages, strict=True)})
        bounds[name] = tuple(itertools.accumulate((lengths[stage] for stage in sorted(lengths)), initial=0))
    return values(run_ranks(_record, RANKS, RECIPES, bounds, timeout_s=240))


@pytest.mark.parametrize("name", RECIPES)
def test_a_step_communicates_as_planned(name: str) -> None:
    assert not plan(name).unknown
    for place in plan(name).places:
        expected: Found = {}
        for each in place.traffic:
            if each.every == 1:
                calls, size = expected.get((each.operation, each.ranks), (0, 0))
                expected[each.operation, each.ranks] = calls + each.calls, size + each.bytes
        found = [recorded()[rank][name] for rank in place.ranks]
        for rank, mine in zip(place.ranks, found, strict=True):
            alike, planned = (
                {key: each[key] for key in each if key != ("all_to_all", RANKS)} for each in (mine, expected)
            )
            assert alike == planned, f"rank {rank}"
        # The requested rows, and the tokens of experts, differ between ranks; the number of calls does not.
        exchanges = [mine.get(("all_to_all", RANKS), (0, 0))[0] for mine in found]
        assert exchanges == [expected.get(("all_to_all", RANKS), (0, 0))[0]] * len(found)


def _record(rank: int, size: int, folder: str, recipes: dict[str, Table], bounds: Any) -> dict[str, Found]:
    import dataclasses
    import time

    import torch
    import torch.distributed as dist

    import netfold.torch
    from netfold._native import engine
    from netfold_train import Recipe, Trainer
    from netfold_train.data import make_data
    from netfold_train.parallel import pipeline_plan
    from netfold_train.parallel.stages import Cut

    kinds = {number: name for name, number in engine.KINDS.items()}

    class Third:
        """Record the groups' calls in the third step, after DDP has made its final buckets."""

        def __init__(self) -> None:
            self.began_ns, self.found = 0, dict[tuple[str, int], tuple[int, int]]()

        def on_step(self, event: Any) -> None:
            for group in groups if event.step == 3 else ():
                for record in netfold.torch.events(group):
                    kind, size = kinds[int(record["operation"])], group.size()
                    if record["queued_ns"] > self.began_ns and kind not in ("receive", "recv"):
                        # For data that is cut into one block per rank, the record has one block.
                        whole = int(record["bytes"]) * (size if kind in BLOCKS else 1)
                        calls, bytes_ = self.found.get((kind, size), (0, 0))
                        self.found[kind, size] = calls + 1, bytes_ + whole
            self.began_ns = time.perf_counter_ns()

        def __getattr__(self, _: str) -> Any:
            return lambda event: None

    class Few:
        """As many held-out examples as one step takes; they are not the subject of the test."""

        def __init__(self, examples: Any) -> None:
            self.batch = examples.batch

        def __len__(self) -> int:
            return 16

    torch.set_num_threads(1)
    dist.init_process_group("netfold", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    # Also groups of earlier recipes: DTensor reuses an equal mesh that it has seen before, with its groups.
    groups: set[Any] = set()
    made: dict[str, Any] = {}
    found: dict[str, Found] = {}
    for name, table in recipes.items():
        recipe, third = Recipe.model_validate(table), Third()
        data = made.setdefault(recipe.data.name, make_data(recipe.data))
        few = dataclasses.replace(data, held_out=Few(data.held_out))
        pipeline_plan.cut = lambda costs, stages, here=bounds[name]: Cut(here, (1,) * stages)  # type: ignore[assignment]
        trainer = Trainer(recipe, data=few, callbacks=[third])  # type: ignore[list-item]
        mesh = trainer.mesh
        groups |= {dist.group.WORLD, mesh.pipeline.group, mesh.data.group, mesh.tensor.group}
        groups |= {mesh.context.group} if mesh.context is not None else set()
        trainer.fit()
        found[name] = third.found
    dist.destroy_process_group()
    return found
