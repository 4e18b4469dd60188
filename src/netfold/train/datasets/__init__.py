"""Data by name. New data needs a file and a line here."""

from __future__ import annotations

from netfold.train.examples import Data
from netfold.train.recipe import Factory
from netfold.train.recipe.registry import factory

DATASETS = {
    "class-folders": "netfold.train.datasets.classes:class_folders",
    "div2k": "netfold.train.datasets.super_resolution:div2k",
    "fashion-mnist": "netfold.train.datasets.classes:fashion_mnist",
    "flights": "netfold.train.datasets.table:flights",
    "masked-source": "netfold.train.datasets.text:masked_source",
    "photos": "netfold.train.datasets.super_resolution:photos",
    "source": "netfold.train.datasets.text:source",
    "table": "netfold.train.datasets.table:table",
    "tokens": "netfold.train.datasets.text:tokens",
}


def make_data(asked: Factory) -> Data:
    made = factory(asked, DATASETS, "data")()
    if not isinstance(made, Data):
        raise ValueError(f"data {asked.name!r} returned {type(made).__name__}; it must return netfold.train.Data")
    return made
