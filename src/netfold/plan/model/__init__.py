"""Models by what their layers ask of a rank."""

from netfold.plan.model.chain import Chain, Link, Product
from netfold.plan.model.layered import Layered
from netfold.plan.model.timed_step import ReadyBucket, TimedLayer, TimedStep, read_timed_step, timed_step_of
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
    "ReadyBucket",
    "Share",
    "TimedLayer",
    "TimedStep",
    "Transformer",
    "read_timed_step",
    "timed_step_of",
]
