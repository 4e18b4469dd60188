"""The talks' figures once more, measured here: netfold beside gloo in an emulated rack. `netfold bench figures`.

`figure`: what a figure is; `speedup`, `hosts`, `loss`, `packets`, `wires`, `latency`, `efficiency`, `tree`: one each,
how it is measured and what is said of it; `mpi`: the MPI that two of them have beside the others; `by_link`: what the
cost model says of a switch behind another link; `replay`: what the
two of training share; `catalogue`: all of them; `budget`: how the time is shared out; `chart`: pictures, by matplotlib;
`page`: the HTML page; `run`: one figure after the other, and what is kept on disk.

Always: no number on the page that is not in the data beside it; what falls short of the talk is said as plainly as what
does not; what was cut for want of time is said.

Tests: `.venv/bin/pytest tests/bench/test_figures.py`
"""
