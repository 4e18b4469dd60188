"""Benchmarks in nccl-tests' words and columns, each backend paired with its peers on the same machine.

The same worker processes hold one process group a backend. In every round each backend runs once, in turn,
so that whatever else the machine does meets them alike; a ratio is taken round by round and comes with its
spread. Every element of every result is checked.

May use: rack. Only `worker.py`, which runs in processes of its own, imports torch.
Must always hold: nothing but the collective is timed; a wrong element makes the exit code non-zero; a run
has a deadline and leaves no process behind.
One command that tests it: pytest tests/bench
"""
