"""Measures what each wire format keeps: errors of sums, and the result of training. `netfold bench accuracy`.

`formats`: the formats compared, SwitchML's two among them; `tensors`: sums and their errors; `images`, `text`: two
small tasks, with a model each; `rank`: what every rank runs; `run`: the whole measurement; `report`: the tables.

Tests: `.venv/bin/pytest lab/tests/bench/test_accuracy.py`
"""
