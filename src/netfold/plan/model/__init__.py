"""Models by what their layers ask of a rank."""

from netfold.plan.model.chain import Chain, Link, Product
from netfold.plan.model.layered import Layered
from netfold.plan.model.profiled import Profiled, ReadyBucket, TimedLayer, profiled_of, read_profiled
from netfold.plan.model.transformer import Transformer
from netfold.plan.model.work import Collective, Layer, Matmul, Model, Pass, Share

__all__ = [
    "Chain",
    "Collective",
    "Layer",
    "Layered",
    "Link",
    "Matmul",
    "Model",
    "Pass",
    "Product",
    "Profiled",
    "ReadyBucket",
    "Share",
    "TimedLayer",
    "Transformer",
    "profiled_of",
    "read_profiled",
]
