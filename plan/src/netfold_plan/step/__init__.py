"""The time and memory of a step: `predict` computes it in closed form, in less than a millisecond."""

from netfold_plan.step.analytic import limit_of, predict
from netfold_plan.step.constants import FITTED, Constants
from netfold_plan.step.prediction import Memory, Prediction
from netfold_plan.step.stages import Costs, Stage, costs

__all__ = ["FITTED", "Constants", "Costs", "Memory", "Prediction", "Stage", "costs", "limit_of", "predict"]
