"""The interface of data, and its making by name: `netfold_train.zoo` has the names."""

from __future__ import annotations

from netfold_train.data.examples import Data
from netfold_train.recipe import Factory
from netfold_train.recipe.registry import factory, known


def make_data(asked: Factory) -> Data:
    made = factory(asked, known("DATASETS"), "data")()
    if not isinstance(made, Data):
        raise ValueError(f"data {asked.name!r} returned {type(made).__name__}; it must return netfold_train.Data")
    return made
