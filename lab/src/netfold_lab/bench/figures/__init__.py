"""The talks' figures, measured here: netfold beside gloo in an emulated rack. `netfold bench figures`.

`figure`: what a figure is; `speedup`, `hosts`, `loss`, `packets`, `wires`, `latency`, `efficiency`, `tree`: how each
figure is measured, and its text. `by_link`: predictions for slower links of the switch. `replay`: training steps, for
two figures. `budget`: the time of each figure. `chart`, `page`: charts and the HTML page. `run`: all figures, measured
one after another and written to disk.

Always: every number on the page is in the data beside the page. The page says where a result is worse than the talk's,
and what was not measured for lack of time.

Tests: `.venv/bin/pytest lab/tests/bench/test_figures.py`
"""
