"""Train recipes in a world of processes. Importing torch takes seconds, so one world trains several recipes in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ranks import run_ranks, values

Table = dict[str, Any]

# Small enough for a test, with real data: Python's source.
TINY_GPT: Table = {
    "model": {"name": "gpt", "width": 32, "heads": 4, "layers": 4, "context": 32},
    "data": {"name": "source", "context": 32, "held_out": 0.002},
    "training": {"steps": 4, "batch": 16},
    "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
}


def changed(recipe: Table, **sections: Table) -> Table:
    """The recipe with other values for some keys: changed(TINY_GPT, parallel={"data": 2})."""
    return {**recipe, **{name: {**recipe.get(name, {}), **keys} for name, keys in sections.items()}}


def trained(
    recipes: Sequence[Table], ranks: int, *, backend: str = "netfold", timeout_s: float = 150
) -> list[list[Any]]:
    """The outcomes of `Trainer.fit`: [recipe][rank]."""
    found = values(run_ranks(_train, ranks, list(recipes), backend, timeout_s=timeout_s))
    return [list(outcomes) for outcomes in zip(*found, strict=True)]


def _train(rank: int, size: int, folder: str, recipes: list[Table], backend: str) -> list[Any]:
    import torch
    import torch.distributed as dist

    from netfold_train import Recipe, Trainer

    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=size)
    try:
        return [Trainer(Recipe.model_validate(recipe)).fit() for recipe in recipes]
    finally:
        dist.destroy_process_group()
