"""The interface of a model, and its making by name: `netfold_train.zoo` has the names."""

from __future__ import annotations

from torch import nn

from netfold_train.models.model import Model
from netfold_train.recipe import Factory
from netfold_train.recipe.registry import factory, known


def make_model(asked: Factory) -> Model:
    """Make a model. Its weights come from torch's random generator: seed it first.

    The name "hf:PATH" is short for the name "hf" and the option path.
    """
    if asked.name.startswith("hf:"):
        asked = Factory.model_validate({**asked.options, "name": "hf", "path": asked.name.removeprefix("hf:")})
    made = factory(asked, known("MODELS"), "model")()
    if isinstance(made, Model):
        return made
    kind = "a module without a loss" if isinstance(made, nn.Module) else type(made).__name__
    raise ValueError(f"model {asked.name!r} returned {kind}; it must return netfold_train.Model(module, loss)")
