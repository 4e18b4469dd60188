"""The cost model, the choice of algorithms by it, and what training will take by it.

At run time: (operation, size) -> algorithm, wire format, reason. `cost` has the formulas, `topology` what they know of
ranks and links, `fit` makes a link of a probe's samples, `table` the choice; `observed` makes a link of a profile's
operations, `advice` sentences of both. At plan time, and imported by nothing before: `cluster` and `model` say what
there is, `job` what is wanted, `step` predicts it, `events` plays it, `packets` an all_reduce through switches,
`failures` says what is left of a long run, `validate` holds predictions against what others measured; `scaling` and
`slots` are laws and schedules by hand. `search` tries every split; `curve`, `compare`, `sensitivity` and `aggregators`
ask what else would be, `price` and `accuracy` what all of training takes; `ask` reads a question, `answer` answers it,
`show` says it as text, JSON or a page. May import NumPy, the native floor, for what there is a machine for, what
profile has found, and, in `packets` alone, sim; no other room of ours. Always: all ranks of a group hold the same
immutable table; rank 0 makes it, its hash travels with every operation; a choice can be printed with its reason; a
formula is written once.

Tests: `.venv/bin/pytest tests/plan`
"""

