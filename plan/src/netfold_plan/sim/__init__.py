"""The production aggregation machines in virtual time, over a virtual network that may do anything to a packet.

  clock       virtual nanoseconds, and the events that are due
  network     packets and the fate of each: delivered, lost, duplicated, late, truncated, corrupted, refused by a socket
  values      what workers contribute, and the expected result, in NumPy
  harness     workers and switch with the glue of production, and every promise checked at every step
  tree        the same, with leaf switches between the workers and the root
  simulation  one run: harness, network and clock, until no event is due
  scenario    a run made from a seed
  diagram     a run as a sequence diagram

May import netfold._native.protocol and NumPy, and no other package. Invariants: the machines are production's, never
models of them; no sleep and no wall clock; the same seed gives the same run; every run is bounded; a failure names its
seed and the command that replays it.

Tests: `.venv/bin/pytest core/tests/protocol`    One run: `python -m netfold_plan.sim --seed 7 --loss 0.05`
"""
