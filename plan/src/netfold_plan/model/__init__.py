"""Models by the work of their layers on one rank."""

from netfold_plan.model.chain import Chain, ChainLayer, Product
from netfold_plan.model.layer_cost import Bucket, Bucketed, Collective, Layer, Matmul, Measured, Model, Pass, ShardSpec
from netfold_plan.model.layered import Layered
from netfold_plan.model.profiled import Profiled
from netfold_plan.model.timed_step import ReadyBucket, TimedLayer, TimedStep, read_timed_step, timed_step_of
from netfold_plan.model.traced import Gradient, Kernels, Part, TensorSize, Traced
from netfold_plan.model.transformer import Transformer

__all__ = [
    "Bucket",
    "Bucketed",
    "Chain",
    "ChainLayer",
    "Collective",
    "Gradient",
    "Kernels",
    "Layer",
    "Layered",
    "Matmul",
    "Measured",
    "Model",
    "Part",
    "Pass",
    "Product",
    "Profiled",
    "ReadyBucket",
    "ShardSpec",
    "TensorSize",
    "TimedLayer",
    "TimedStep",
    "Traced",
    "Transformer",
    "read_timed_step",
    "timed_step_of",
]
