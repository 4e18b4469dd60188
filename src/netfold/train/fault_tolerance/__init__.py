"""Failures of a run, and the reaction to each.

`state` names the contents of a checkpoint. `atomic_checkpoint` makes its folder complete or absent. `recovery` writes
it over a group of its own, and chooses where a run continues. `drift` compares copies before a checkpoint. `policies`,
`stop`, `straggler` and `bad_examples` each handle one kind of failure.
"""
