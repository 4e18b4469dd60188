"""What a step will take: `predict` in closed form, in less than a millisecond."""

from netfold.plan.step.costs import Costs, Stage, costs
from netfold.plan.step.predict import predict
from netfold.plan.step.prediction import KINDS, Memory, Prediction

__all__ = ["KINDS", "Costs", "Memory", "Prediction", "Stage", "costs", "predict"]
