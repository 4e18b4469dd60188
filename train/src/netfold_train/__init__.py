"""Training by recipe, on torch's own parts over netfold: all kinds of parallelism, and fault tolerance.

    netfold train edsr                                    # starts its ranks, or is one (torchrun, Slurm, mpirun)

    recipe = netfold_train.Recipe(model={"name": "gpt"}, data={"name": "source"}, training={"steps": 100})
    netfold_train.Trainer(recipe).fit()                   # with torch.distributed initialised

Modules: `recipe` reads a recipe. `launch` and `rank` start it. `parallel` turns a model into this rank's part of it
(`Replica`). `trainer` is the loop. `fault_tolerance` reacts to failures. `callbacks` receive `events`. Each part can be
used alone, in another loop.
`zoo` has models and data, `dry_run` traces, `runs` keeps a run's folder. May use: torch, netfold and netfold_plan.
Invariant: the contents of a batch depend on the seed and the samples before it, never on the number of ranks.
Tests: `pytest train/tests/train`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from netfold_train.recipe import Recipe

if TYPE_CHECKING:
    from netfold_train.data.examples import BadExampleError, Batch, Data, Examples, Metric
    from netfold_train.models.model import Chain, Model
    from netfold_train.trainer import Outcome, Trainer

__all__ = ["BadExampleError", "Batch", "Chain", "Data", "Examples", "Metric", "Model", "Outcome", "Recipe", "Trainer"]

_PLACES = dict.fromkeys(("Chain", "Model"), "models.model") | dict.fromkeys(("Outcome", "Trainer"), "trainer")


def __getattr__(name: str) -> Any:
    # Reading a recipe needs no torch: the modules that import torch are loaded on demand.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"netfold_train.{_PLACES.get(name, 'data.examples')}"), name)
