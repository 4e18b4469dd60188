"""Models by what their layers ask of a rank."""

from netfold.plan.model.chain import Chain, Link, Product
from netfold.plan.model.layered import Layered
from netfold.plan.model.profiled import Profiled
from netfold.plan.model.traced import Bulk, Gradient, Kernels, Part, Traced
from netfold.plan.model.transformer import Transformer
from netfold.plan.model.work import Bucket, Bucketed, Collective, Layer, Matmul, Model, Pass, Share

__all__ = [
    "Bucket",
    "Bucketed",
    "Bulk",
    "Chain",
    "Collective",
    "Gradient",
    "Kernels",
    "Layer",
    "Layered",
    "Link",
    "Matmul",
    "Model",
    "Part",
    "Pass",
    "Product",
    "Profiled",
    "Share",
    "Traced",
    "Transformer",
]
