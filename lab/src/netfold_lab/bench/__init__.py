"""Benchmarks with nccl-tests' terms and columns, each backend paired with its peers on the same machine.

A backend (`backends/`) is a torch backend, netfold.Communicator, or an MPI. Backends that can live together share
processes, a *world*. `network.py` is this machine or a rack while it exists. `ranks.py` starts ranks there, or under an
MPI, sends them orders and collects their answers in time, also for the scripts in bench/. `rank.py` is the program of a
world's ranks. The runner (`runner.py`) lets one backend at a time run a burst of calls, all backends in every round, so
a disturbance of the machine affects all alike. A ratio is taken round by round and comes with its spread.
`rack_runner.py` makes single calls while a rack changes; `links.py` and `accuracy/` use the same ranks. `goals.py`
holds netfold's claims; `suite.py` measures them and prints both. `step.py` replays training steps, with a timer for the
accelerator.

May use: rack, and netfold as its users do. Only `backends/torch_backend.py`, `ddp.py` and `accuracy/`'s ranks import
torch. Invariants: nothing but the collective is timed; every element is checked, and a wrong one makes the exit code
non-zero; a run has a deadline and leaves no process behind.

Tests: `.venv/bin/pytest lab/tests/bench`
"""
