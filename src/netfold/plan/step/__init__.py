"""The time and memory of a step: `predict` computes it in closed form, in less than a millisecond."""

from netfold.plan.step.analytic import limit_of, predict
from netfold.plan.step.constants import FITTED, Constants
from netfold.plan.step.prediction import Memory, Prediction
from netfold.plan.step.stages import Costs, Stage, costs

__all__ = ["FITTED", "Constants", "Costs", "Memory", "Prediction", "Stage", "costs", "limit_of", "predict"]
