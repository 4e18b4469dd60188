"""Benchmarks in nccl-tests' words and columns, each backend paired with its peers on the same machine.

A backend is who is measured (`backends/`): a torch backend, netfold.Communicator, an MPI. Sides that can live together
share processes, a *world*; the runner (`runner.py`) lets one backend at a time run a burst of calls, all backends in
every round, so that whatever else the machine does meets them alike; a ratio is taken round by round and comes with its
spread. `goals.py` says what netfold claims; `suite.py` measures it and prints both. `models/` and `step.py` replay
training steps, in which the accelerator is a timer.

May use: rack, and netfold as its users do. Only `backends/torch_side.py` and `ddp.py`, which run in ranks, import
torch. Must always hold: nothing but the collective is timed; every element is checked, and a wrong one makes the exit
code non-zero; a run has a deadline and leaves no process behind.
One command that tests it: pytest tests/bench
"""
