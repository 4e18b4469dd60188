"""Models by name. One file a family; a new one is a file and a line here."""

from __future__ import annotations

from torch import nn

from netfold.train.model import Model
from netfold.train.named import factory
from netfold.train.recipe import Factory

MODELS = {
    "dlrm": "netfold.train.models.dlrm:dlrm",
    "edsr-baseline": "netfold.train.models.edsr:baseline",
    "gpt": "netfold.train.models.transformer:gpt",
    "linear-stack": "netfold.train.models.linear:linear_stack",
}


def make_model(asked: Factory) -> Model:
    """Weights are drawn from torch's generator: seed it first."""
    made = factory(asked, MODELS, "model")(**asked.options)
    if isinstance(made, Model):
        return made
    kind = "a module without a loss" if isinstance(made, nn.Module) else type(made).__name__
    raise ValueError(f"model {asked.name!r} returned {kind}; it must return netfold.train.Model(module, loss)")
