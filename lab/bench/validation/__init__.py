"""Predictions of `netfold plan` beside published measurements and beside the claims of five talks.

`sources` predicts each published table and `claims` the talks' numbers; `lab/bench/results/plan.md` is the result.
`runs` reads a table of measured steps and `report` predicts it; `calibrate` fits constants to a few of these runs.
`score` has the errors.
May import NumPy, `netfold_plan` and `netfold.page`. No source is predicted by constants that saw its rows, unless its
`fitted` says so.

Run: `python lab/bench/validation --help`. Tests: `.venv/bin/pytest plan/tests/plan/test_validation.py
plan/tests/plan/test_claims.py`
"""
