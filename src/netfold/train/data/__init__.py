"""Data by name. New data needs a file and a line here."""

from __future__ import annotations

from netfold.train.data.examples import Data
from netfold.train.recipe import Factory
from netfold.train.recipe.registry import factory

DATASETS = {
    "class-folders": "netfold.train.data.classes:class_folders",
    "div2k": "netfold.train.data.super_resolution:div2k",
    "documents": "netfold.train.data.documents:documents",
    "fashion-mnist": "netfold.train.data.classes:fashion_mnist",
    "flights": "netfold.train.data.table:flights",
    "labelled-documents": "netfold.train.data.documents:labelled_documents",
    "masked-documents": "netfold.train.data.documents:masked_documents",
    "masked-source": "netfold.train.data.text:masked_source",
    "photos": "netfold.train.data.super_resolution:photos",
    "source": "netfold.train.data.text:source",
    "table": "netfold.train.data.table:table",
    "tokens": "netfold.train.data.text:tokens",
}


def make_data(asked: Factory) -> Data:
    made = factory(asked, DATASETS, "data")()
    if not isinstance(made, Data):
        raise ValueError(f"data {asked.name!r} returned {type(made).__name__}; it must return netfold.train.Data")
    return made
