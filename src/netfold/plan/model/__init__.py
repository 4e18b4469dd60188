"""Models by what their layers ask of a rank."""

from netfold.plan.model.transformer import Transformer
from netfold.plan.model.work import Collective, Layer, Matmul, Model, Pass, Share

__all__ = ["Collective", "Layer", "Matmul", "Model", "Pass", "Share", "Transformer"]
