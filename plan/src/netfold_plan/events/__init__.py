"""A step of training simulated as events: effects that closed forms leave out, and the timeline of each rank.

`simulate` takes the arguments of the analytical `predict` and gives the same Prediction, with a timeline.

  schedule    the order in which a stage processes its microbatches
  conditions  jitter, stragglers, shared links, interference
  mesh        the places of ranks, and the links that they share
  buckets     the collectives of data-parallel ranks, and the tasks that wait for them
  build       a step for the event loop: tasks, durations, messages
  timed_step  the same for a step profiled on one host
  event_loop  lanes and stages
  resources   the clock, links that flows share, and cores that hosts share
  simulate    the parts of the simulated step
  timeline    the same by rank, as a list and as a file for Perfetto
"""

from netfold_plan.events.conditions import IDEAL, Conditions
from netfold_plan.events.simulate import Simulated, simulate
from netfold_plan.events.timeline import Slice, timeline, write_timeline

__all__ = ["IDEAL", "Conditions", "Simulated", "Slice", "simulate", "timeline", "write_timeline"]
