"""Models by name. A new model needs a file and a line here."""

from __future__ import annotations

from torch import nn

from netfold.train.models.model import Model
from netfold.train.recipe import Factory
from netfold.train.recipe.registry import factory

MODELS = {
    "bert": "netfold.train.models.transformer:bert",
    "dlrm": "netfold.train.models.dlrm:dlrm",
    "edsr": "netfold.train.models.edsr:edsr",
    "edsr-baseline": "netfold.train.models.edsr:baseline",
    "edsr-large": "netfold.train.models.edsr:large",
    "gpt": "netfold.train.models.transformer:gpt",
    "hf": "netfold.train.models.hf:hf",
    "linear-stack": "netfold.train.models.linear:linear_stack",
    "resnet18": "netfold.train.models.resnet:resnet18",
    "resnet50": "netfold.train.models.resnet:resnet50",
}


def make_model(asked: Factory) -> Model:
    """Make a model. Its weights come from torch's random generator: seed it first.

    The name "hf:PATH" is short for the name "hf" and the option path.
    """
    if asked.name.startswith("hf:"):
        asked = Factory.model_validate({**asked.options, "name": "hf", "path": asked.name.removeprefix("hf:")})
    made = factory(asked, MODELS, "model")()
    if isinstance(made, Model):
        return made
    kind = "a module without a loss" if isinstance(made, nn.Module) else type(made).__name__
    raise ValueError(f"model {asked.name!r} returned {kind}; it must return netfold.train.Model(module, loss)")
