"""Every way to split a model, trained on real data, beside one process: .venv/bin/python lab/bench/parallelisms.py

Three questions of each split: does the first step's loss differ from one process' by no more than f32 sums in another
order may; does the whole run stay as near to one process' as two runs of data parallel over gloo are to each other that
differ only in which rank takes which part of the batch; and does it reach the same metric.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import driver
from driver import Place, Rank

# Half of the last bit of a loss in f32: no two losses are closer than this.
F32_ROUNDING = 2.0**-24
Table = dict[str, Any]

GPT: Table = {
    "model": {"name": "gpt", "width": 64, "heads": 4, "layers": 4, "context": 64},
    "data": {"name": "source", "context": 64, "held_out": 0.005},
    "training": {"batch": 32},
    "optimizer": {"name": "adamw", "lr": 2e-3},
    "schedule": {"warmup": 10},
}
EDSR: Table = {
    "model": {"name": "edsr", "features": 16, "blocks": 6},
    "data": {"name": "photos", "patch": 24, "tiles": 64},
    "training": {"batch": 8},
    "optimizer": {"name": "adam", "lr": 1e-3},
    "schedule": {"warmup": 10},
}
RESNET: Table = {
    "model": {"name": "resnet18", "channels": 1},
    "data": {"name": "fashion-mnist", "held_out": 512},
    "training": {"batch": 32},
    "optimizer": {"name": "sgd", "lr": 0.05},
    "schedule": {"warmup": 10},
}
DLRM: Table = {
    "model": {"name": "dlrm", "numbers": 8, "rows": [17, 4, 105, 13, 8, 20]},
    "data": {"name": "flights"},
    "training": {"batch": 512},
    "optimizer": {"name": "adam", "lr": 2e-3},
}
# The models and their splits; gloo trains the first one too.
SPLITS: list[tuple[str, Table, list[tuple[str, Table]]]] = [
    (
        "GPT on Python's source",
        GPT,
        [
            ("data 4", {"data": 4}),
            ("data 2, accumulate 4", {"data": 2, "accumulate": 4}),
            ("ZeRO 1, data 4", {"data": 4, "zero": 1}),
            ("ZeRO 2, data 4", {"data": 4, "zero": 2}),
            ("ZeRO 3, data 4", {"data": 4, "zero": 3}),
            ("pipeline 4, GPipe", {"pipeline": 4, "microbatches": 8, "schedule": "gpipe"}),
            ("pipeline 4, 1F1B", {"pipeline": 4, "microbatches": 8}),
            ("pipeline 2, interleaved", {"pipeline": 2, "microbatches": 8, "schedule": "interleaved"}),
            ("pipeline 2, zero bubble", {"pipeline": 2, "microbatches": 8, "schedule": "zero-bubble"}),
            ("pipeline 2, ZB-V", {"pipeline": 2, "microbatches": 8, "schedule": "zero-bubble-v"}),
            ("tensor 2, alternating", {"tensor": 2}),
            ("tensor 2, by rows", {"tensor": 2, "style": "colwise"}),
            ("tensor 2, by columns", {"tensor": 2, "style": "rowwise"}),
            ("tensor 2, sequence", {"tensor": 2, "sequence": True}),
            ("data 2 x tensor 2", {"data": 2, "tensor": 2}),
            ("data 2 x tensor 2, ZeRO 1", {"data": 2, "tensor": 2, "zero": 1}),
            ("data 2 x tensor 2, ZeRO 3", {"data": 2, "tensor": 2, "zero": 3}),
            ("data 2 x pipeline 2", {"data": 2, "pipeline": 2, "microbatches": 4}),
            ("data 2 x pipeline 2, ZeRO 1", {"data": 2, "pipeline": 2, "microbatches": 4, "zero": 1}),
            ("data 2 x pipeline 2, ZeRO 2", {"data": 2, "pipeline": 2, "microbatches": 4, "zero": 2}),
            ("pipeline 2 x tensor 2", {"pipeline": 2, "tensor": 2, "microbatches": 4}),
            (
                "data 2 x pipeline 2 x tensor 2, ZeRO 1",
                {"data": 2, "pipeline": 2, "tensor": 2, "microbatches": 4, "zero": 1},
            ),
        ],
    ),
    (
        "EDSR on photographs",
        EDSR,
        [("data 4", {"data": 4}), ("pipeline 4, its skips across", {"pipeline": 4, "microbatches": 4})],
    ),
    (
        "ResNet-18 on Fashion-MNIST",
        RESNET,
        [("data 4, batch norm over 4", {"data": 4, "batch_norm": 4}), ("data 4, over 2", {"data": 4, "batch_norm": 2})],
    ),
    (
        "DLRM on flights",
        DLRM,
        [
            ("data 4, tables replicated", {"data": 4}),
            ("data 4, whole tables shared out", {"data": 4, "embeddings": "table_wise"}),
            ("data 4, tables by rows", {"data": 4, "embeddings": "row_wise"}),
        ],
    ),
]


@dataclass(frozen=True)
class Trained:
    losses: tuple[float, ...]
    metric: float


def train(me: Rank, backend: str) -> None:
    """A rank. An order is a recipe, and by how many places the data's shares move on among the ranks."""
    from netfold_train import Recipe, Trainer

    def run(recipe: Table, shift: int) -> Trained:
        trainer = Trainer(Recipe.model_validate(recipe))
        data = trainer.mesh.data
        trainer.mesh.data = replace(data, rank=(data.rank + shift) % data.size)
        outcome = trainer.fit()
        return Trained(outcome.losses, outcome.metric)

    with me.torch_group(backend):
        me.serve(run)


def run(recipe: Table, split: Table, steps: int, *, backend: str = "netfold", shift: int = 0) -> Trained:
    training = {**recipe["training"], "steps": steps}
    parallel = {"data": 1, **split}
    if not parallel.get("zero"):
        parallel["bucket_mb"] = 25  # not the quickest of this run: sums in the same order every time
    if "accumulate" in parallel:
        training["accumulate"] = parallel.pop("accumulate")
    size = parallel["data"] * parallel.get("pipeline", 1) * parallel.get("tensor", 1)
    with driver.ranks_at(Place(size), train, backend) as ranks:
        found = ranks.ask({**recipe, "training": training, "parallel": parallel}, shift)
    assert len({trained.losses for trained in found}) == 1, "ranks report different losses"
    trained: Trained = found[0]
    return trained


def apart(one: Trained, other: Trained) -> float:
    """Root mean square of the relative differences of the losses."""
    pairs = zip(one.losses, other.losses, strict=True)
    return statistics.fmean(((a - b) / b) ** 2 for a, b in pairs) ** 0.5


def section(name: str, recipe: Table, splits: list[tuple[str, Table]], steps: int) -> str:
    alone = run(recipe, {}, steps)
    gloo = [run(recipe, splits[0][1], steps, backend="gloo", shift=shift) for shift in range(3)]
    orders = ((gloo[0], gloo[1]), (gloo[1], gloo[2]), (gloo[0], gloo[2]))
    yardstick = max(F32_ROUNDING, *(apart(one, other) for one, other in orders))
    metrics = [each.metric for each in gloo]
    off = [apart(each, alone) for each in gloo]
    rows = []
    for label, split in splits:
        began = time.perf_counter()
        trained = run(recipe, split, steps)
        seconds = time.perf_counter() - began
        first = abs(trained.losses[0] - alone.losses[0]) / alone.losses[0]
        whole = apart(trained, alone)
        differences = [f"{first:.1e}", f"{whole:.1e}", f"{whole / yardstick:.2f}"]
        rows.append([label, *differences, f"{trained.metric:.4f}", f"{seconds:.0f}"])
        print(*rows[-1], flush=True)
    return f"""## {name}

One process: loss {alone.losses[0]:.6f} at the first step, {alone.losses[-1]:.4f} at step {steps}, metric
{alone.metric:.4f}. gloo, {splits[0][0]}, three orders of ranks: {yardstick:.1e} apart, metric {min(metrics):.4f} to
{max(metrics):.4f}; from one process {min(off):.1e} to {max(off):.1e} apart.

{driver.table("split | first step apart | whole run apart | of gloo's | metric | s", rows)}"""


def parallelisms(steps: int = 60, only: str = "") -> str:
    """Every way to split a model, beside one process"""
    sections = [section(*each, steps) for each in SPLITS if only in each[0]]
    return "\n\n".join(
        [
            f"""torch's CPU build, f32. *First step apart*: relative difference of the first loss. *Whole run apart*:
root mean square, over all steps, of the relative differences of the losses. *Of gloo's*: divided by the largest such
difference between three runs of data parallel over gloo that only differ in which rank takes which part of the batch
(at least {F32_ROUNDING:.0e}, the rounding of a loss).""",
            *sections,
        ]
    )


if __name__ == "__main__":
    driver.run(parallelisms)
