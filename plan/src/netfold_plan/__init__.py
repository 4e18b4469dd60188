"""Predict the time and memory of training, by the formulas that choose algorithms at run time (`netfold.tuning`).

`cluster` and `model` describe what there is, and `job` what is trained. `step` predicts a step in closed form, `events`
simulates one, `packets` simulates an all_reduce through switches, and `failures` gives the goodput of a long run.
`search` tries every split. `variants` predicts the same request with something changed;
`training` has the length and the cost of a whole training. `request` reads a request, `result` answers it, and
`render` prints the result as text, JSON or a page. `shared_rules` are rules that netfold_train uses, too. `sim` drives
the protocol's machines over a virtual network. `lab/bench/validation` compares predictions with published measurements.

May import NumPy and netfold's tuning, profile and page; `packets` alone imports sim. Always: a cost formula is written
once, in tuning.

Tests: `.venv/bin/pytest plan/tests/plan`
"""
