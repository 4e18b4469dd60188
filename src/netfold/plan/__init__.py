"""What training will take, by the formulas that choose at run time (`netfold.tuning`).

`profile_link` makes a link of a profile's operations, `advice` sentences of it and of the formulas. `cluster` and
`model` say what there is, `job` what is wanted, `step` predicts it, `events` plays it, `packets` an all_reduce through
switches, `failures` says what is left of a long run, `validate` holds predictions against what others measured;
`scaling` and `slots` are laws and schedules by hand. `search` tries every split; `scaling_curve`, `compare`,
`sensitivity` and `aggregators` ask what else would be, `cost_of_training` and `training_length` what all of training
takes; `request` reads a request, `result` has the result, `render` prints it as text, JSON or a page. May import NumPy,
the native engine, tuning, what profile has found, and, in `packets` alone, sim. Always: a formula is written once, in
tuning.

Tests: `.venv/bin/pytest tests/plan`
"""
