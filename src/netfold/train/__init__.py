"""Training by recipe, on torch's own parts over netfold: every way to split a model, and what makes them survive.

    netfold train recipes/edsr.toml                       # starts its ranks, or is one (torchrun, Slurm, mpirun)

    recipe = netfold.train.Recipe(model={"name": "gpt"}, data={"name": "source"}, training={"steps": 100})
    netfold.train.Trainer(recipe).fit()                   # in a world of torch.distributed

Layers: `recipe` says what is asked, and what is wrong with it; `explain` what it comes to; `launch` and `rank` start
it; `parallel` makes a model into this rank's part of it (`Replica`), `trainer` is the loop, `fault_tolerance` what it
lives through, `events` are who is told. Each part works alone in a loop of one's own.
May use: torch, plan, profile, and the communicator's names for launchers. Nothing imports it but cli and demo.
Always: what a batch holds is a function of the seed and of the samples before it, never of the ranks.
Tested by `pytest tests/train`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from netfold.train.recipe import Recipe

if TYPE_CHECKING:
    from netfold.train.examples import BadExampleError, Batch, Data, Examples, Metric
    from netfold.train.model import Chain, Model
    from netfold.train.trainer import Outcome, Trainer

__all__ = ["BadExampleError", "Batch", "Chain", "Data", "Examples", "Metric", "Model", "Outcome", "Recipe", "Trainer"]

_PLACES = {
    "examples": ("Batch", "Data", "Examples", "Metric", "BadExampleError"),
    "model": ("Chain", "Model"),
    "trainer": ("Outcome", "Trainer"),
}


def __getattr__(name: str) -> Any:
    # A recipe is read without torch: what needs it is loaded when it is asked for.
    import importlib

    for module, names in _PLACES.items():
        if name in names:
            return getattr(importlib.import_module(f"netfold.train.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
