"""Every way to split a model, trained on real data, beside one process: python bench/parallelisms.py [--steps N]

Three questions of each: is the first step's loss that of one process, within what f32 sums in another order may differ
by; does the whole run stay as near to one process' as two runs of data parallel over gloo are to each other that differ
only in which rank takes which part of the batch; and does it reach the same metric. Rewrites
bench/results/parallelisms.md.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

# What a loss in f32 is rounded by: nearer to each other than this are no two of them.
F32_ROUNDING = 2.0**-24
RESULTS = Path(__file__).parent / "results" / "parallelisms.md"
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
# What is trained, and the ways it is split; the first is what gloo is asked for, too.
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


def train(rank_recipe: Table, backend: str, turn: int) -> Trained:
    """What a rank does. turn: by how many places the data's shares are moved on among the ranks."""
    import torch
    import torch.distributed as dist

    from netfold.train import Recipe, Trainer

    torch.set_num_threads(1)
    dist.init_process_group(backend)
    trainer = Trainer(Recipe.model_validate(rank_recipe))
    data = trainer.mesh.data
    trainer.mesh.data = replace(data, rank=(data.rank + turn) % data.size)
    outcome = trainer.fit()
    dist.destroy_process_group()
    return Trained(outcome.losses, outcome.metric)


def run(recipe: Table, split: Table, steps: int, *, backend: str = "netfold", turn: int = 0) -> Trained:
    training = {**recipe["training"], "steps": steps}
    parallel = {"data": 1, **split}
    if parallel.get("zero", 0) < 2:
        parallel["bucket_mb"] = 25  # not the quickest of this run: sums in the same order every time
    if "accumulate" in parallel:
        training["accumulate"] = parallel.pop("accumulate")
    ranks = parallel["data"] * parallel.get("pipeline", 1) * parallel.get("tensor", 1)
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, max_restarts=0, rdzv_backend="c10d", rdzv_endpoint="localhost:0"
    )
    results: dict[int, Trained] = elastic_launch(config, train)(
        {**recipe, "training": training, "parallel": parallel}, backend, turn
    )
    assert len({trained.losses for trained in results.values()}) == 1, "ranks differ in what they say of the loss"
    return results[0]


def apart(one: Trained, other: Trained) -> float:
    """Root mean square of the relative differences of the losses."""
    pairs = zip(one.losses, other.losses, strict=True)
    return statistics.fmean(((a - b) / b) ** 2 for a, b in pairs) ** 0.5


def measure(name: str, recipe: Table, splits: Sequence[tuple[str, Table]], steps: int) -> list[str]:
    alone = run(recipe, {}, steps)
    ways = splits[0][1]
    gloo = [run(recipe, ways, steps, backend="gloo", turn=turn) for turn in range(3)]
    orders = ((gloo[0], gloo[1]), (gloo[1], gloo[2]), (gloo[0], gloo[2]))
    yardstick = max(F32_ROUNDING, *(apart(one, other) for one, other in orders))
    metrics = [each.metric for each in gloo]
    off = [apart(each, alone) for each in gloo]
    lines = [
        f"## {name}",
        "",
        f"One process: loss {alone.losses[0]:.6f} at the first step, {alone.losses[-1]:.4f} at step {steps}, metric "
        f"{alone.metric:.4f}. gloo, {splits[0][0]}, three orders of ranks: {yardstick:.1e} apart, metric "
        f"{min(metrics):.4f} to {max(metrics):.4f}; from one process {min(off):.1e} to {max(off):.1e} apart.",
        "",
        "| split | first step apart | whole run apart | of gloo's | metric | s |",
        "|---|---|---|---|---|---|",
    ]
    for label, split in splits:
        began = time.perf_counter()
        trained = run(recipe, split, steps)
        seconds = time.perf_counter() - began
        first = abs(trained.losses[0] - alone.losses[0]) / alone.losses[0]
        whole = apart(trained, alone)
        row = (
            f"| {label} | {first:.1e} | {whole:.1e} | {whole / yardstick:.2f} | {trained.metric:.4f} | {seconds:.0f} |"
        )
        print(row, flush=True)
        lines.append(row)
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--only", help="the rows of models whose name has this word")
    asked = parser.parse_args()
    lines = [
        "# Every way to split a model, beside one process",
        "",
        f"`python bench/parallelisms.py --steps {asked.steps}`, {platform.machine()}, 2 cores, torch's CPU build, f32. "
        "*First step apart*: relative difference of the first loss. *Whole run apart*: root mean square, over all "
        "steps, of the relative differences of the losses; *of gloo's*: divided by the largest such difference between "
        "three runs of data parallel over gloo that only differ in which rank takes which part of the batch (at least "
        f"{F32_ROUNDING:.0e}, the rounding of a loss).",
        "",
    ]
    for name, recipe, splits in SPLITS:
        if asked.only is None or asked.only in name:
            lines += measure(name, recipe, splits, asked.steps)
    if asked.only is None:
        RESULTS.write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
