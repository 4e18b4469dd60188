"""Failures of a run, and the reaction to each.

`state` names the contents of a checkpoint. `atomic_checkpoint` makes its folder complete or absent. `checkpoint` writes
it over a group of its own. `recovery` chooses where a run continues, and counts repeated work. `drift` compares
copies before a checkpoint. `policies`, `stop`, `straggler` and `bad_examples` each handle one kind of failure.
"""
