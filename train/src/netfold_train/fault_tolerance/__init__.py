"""Failures of a run, and the reaction to each.

`policies`, `stop`, `straggler` and `bad_examples` each handle one kind of failure. `step_vote` makes all ranks decide
alike.
"""
