"""The interface of data, and its making by name: `netfold.zoo` has the names."""

from __future__ import annotations

from netfold.train.data.examples import Data
from netfold.train.recipe import Factory
from netfold.train.recipe.registry import factory, known


def make_data(asked: Factory) -> Data:
    made = factory(asked, known("DATASETS"), "data")()
    if not isinstance(made, Data):
        raise ValueError(f"data {asked.name!r} returned {type(made).__name__}; it must return netfold.train.Data")
    return made
