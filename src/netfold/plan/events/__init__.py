"""A step of training played as events: what closed forms leave out, and when each rank does what.

`simulate` takes what the analytical `predict` takes, and gives the same Prediction, with a timeline.

  schedule    in which order a stage works off its microbatches
  conditions  jitter, stragglers, shared links, interference
  mesh        where ranks stand, and which links they share
  timed_step  a step as one host's profile shows it, on a cluster of many
  cores       what hosts that share cores do, in turn
  buckets     what data-parallel ranks do together, and what waits for it
  build      a step written out: tasks, durations, messages
  event_loop        the events, in the order of time
  links       flows that share links
  simulate    the parts of the step that was played
  timeline    the same by rank, as a list and as a file for Perfetto
"""

from netfold.plan.events.conditions import IDEAL, Conditions
from netfold.plan.events.simulate import Simulated, simulate
from netfold.plan.events.timeline import Slice, timeline, write_timeline

__all__ = ["IDEAL", "Conditions", "Simulated", "Slice", "simulate", "timeline", "write_timeline"]
