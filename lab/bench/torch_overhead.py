"""Measure what torch and netfold's Python cost a call: a 4-byte all_reduce on 2 ranks, layer by layer, beside gloo.

    .venv/bin/python lab/bench/torch_overhead.py [--python PYTHON,...]

Layers of netfold, each a whole all_reduce between the two ranks, entered one layer deeper:

- torch    `torch.distributed.all_reduce`, as a user calls it;
- backend  the method that torch calls (`Operations.allreduce`): without torch's own Python and dispatch;
- group    `Group.run_in_place` or `Group.start_in_place`: without netfold's Python for torch;
- native   the native group's `submit` and `wait` alone.

Layers and gloo take turns within a round; both ranks leave one start line before a turn. A sync call is timed as a
whole. Of an async call "submit" is the time until the Work is there, "in all" includes its wait.
`--python` names interpreters of environments with other versions of torch (each with netfold): their launches take
turns, so that all meet the same machine. Variables may stand before an interpreter: "TORCH_FR_BUFFER_SIZE=0 PYTHON".
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import driver
import numpy as np
from driver import Place, Rank, take_turns

SIDES = ("gloo", "torch", "backend", "group", "native")
MODES = ("sync", "async, submit", "async, in all")
NS = 1e-9


def operations(group: Any) -> Any:
    """The Python object whose methods torch calls."""
    try:
        from netfold.torch.operations import operations_of
    except ImportError:  # netfold before torch 2.14 was supported: the group itself
        return group
    return operations_of(group)


def caller(side: str, groups: dict[str, Any], tensor: Any, async_op: bool) -> Any:
    """A function without arguments: one all_reduce on this side. Async: the call returns a function that waits."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import AllreduceOptions

    from netfold.communicator.group import KINDS
    from netfold.torch import calls

    if side in ("gloo", "torch"):
        group = groups["gloo" if side == "gloo" else "netfold"]
        if not async_op:
            return lambda: dist.all_reduce(tensor, group=group)
        return lambda: dist.all_reduce(tensor, group=group, async_op=True).wait
    ours = operations(groups["netfold"])
    if side == "backend":
        opts = AllreduceOptions()
        opts.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
        opts.asyncOp = async_op
        tensors = [tensor]
        if not async_op:
            return lambda: ours.allreduce(tensors, opts).wait()
        return lambda: ours.allreduce(tensors, opts).wait
    netfold, region = ours.netfold, (tensor.data_ptr(), tensor.nbytes)
    kind, dtype = KINDS["all_reduce"], calls.DTYPE_CODES[tensor.dtype]
    reduce, average = calls.REDUCE_CODES[hash(dist.ReduceOp(dist.ReduceOp.SUM))]
    if side == "group":
        if not async_op:
            return lambda: netfold.run_in_place(kind, dtype, reduce, average, region, tensor)

        def start() -> Any:
            operation = netfold.start_in_place(kind, dtype, reduce, average, region, tensor, None, wait_here=False)
            return lambda: netfold.wait(operation)

        return start
    native, regions, limit_ns = netfold._native, (region,), int(netfold.timeout_s / NS)

    def submit() -> Any:
        operation = native.submit(kind, dtype, reduce, average, 0, (), regions, tensor, limit_ns, not async_op)
        if async_op:
            return lambda: native.wait(operation, -1)
        if not operation.done:
            native.wait(operation, -1)
        return None

    return submit


def serve(me: Rank) -> None:
    """A rank. An order is a turn of a side: median nanoseconds of a call by mode; and torch's version."""
    import torch
    import torch.distributed as dist

    tensor = torch.ones(1)
    clock = time.perf_counter_ns
    with me.torch_group():
        groups = {"netfold": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}

        def run(side: str, calls: int) -> tuple[list[float], str]:
            took = np.zeros((len(MODES), calls), dtype=np.int64)
            for async_op in (False, True):
                call = caller(side, groups, tensor, async_op)
                tensor.fill_(1.0)
                me.line.cross()
                # Two loops: a branch in one loop would be timed with the call.
                if not async_op:
                    for index in range(calls):
                        began = clock()
                        call()
                        took[0, index] = clock() - began
                else:
                    for index in range(calls):
                        began = clock()
                        wait = call()
                        submitted = clock()
                        wait()
                        took[1, index] = submitted - began
                        took[2, index] = clock() - began
                assert tensor.item() == float(me.size) ** calls or not torch.isfinite(tensor), f"{side}: {tensor}"
            return np.median(took, axis=1).tolist(), torch.__version__

        me.serve(run)


def launch(rounds: int, calls: int, python: str) -> tuple[np.ndarray[Any, Any], str]:
    """One launch: medians of each round's calls, [side, mode, round] in ns; and torch's version, with variables."""
    *variables, interpreter = shlex.split(python)
    environment = dict(variable.split("=", 1) for variable in variables)
    with driver.ranks_at(Place(2), serve, environment=environment, python=interpreter, deadline_s=600) as ranks:
        found = take_turns(SIDES, rounds, lambda side: ranks.ask(side, calls))
    medians = [[np.mean([medians for medians, _ in answers], axis=0) for answers in found[side]] for side in SIDES]
    version = found[SIDES[0]][0][0][1].partition("+")[0]
    return np.moveaxis(np.array(medians), 2, 1), " ".join([version, *variables])


def commit_of(python: str) -> str:
    """The commit of the tree of an environment's netfold; its version where there is no checkout."""
    script = "import netfold, importlib.metadata as m; print(netfold.__file__); print(m.version('netfold'))"
    where, version = subprocess.run(
        [shlex.split(python)[-1], "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()
    ended = subprocess.run(
        ["git", "-C", str(Path(where).parent), "describe", "--always", "--dirty=+"], capture_output=True, text=True
    )
    return ended.stdout.strip() or version


def torch_overhead(python: str = sys.executable, launches: int = 5, rounds: int = 20, calls: int = 200) -> str:
    """Cost of a call"""
    rows = []
    found = take_turns(python.split(","), launches, partial(launch, rounds, calls), warmups=0)
    for interpreter, runs in found.items():
        medians = np.concatenate([each for each, _ in runs], axis=-1)
        for place, mode in enumerate(MODES):
            cells, middle = [], {}
            for side, values in zip(SIDES, medians[:, place] / 1e3, strict=True):
                low, middle[side], high = np.percentile(values, (25, 50, 75))
                cells.append(f"{middle[side]:.1f} [{low:.1f}, {high:.1f}]")
            ratio = np.median(medians[1, place] / medians[0, place])
            shares = (middle["torch"] - middle["backend"], middle["backend"] - middle["native"])
            costs = [f"{ratio:.2f}", *(f"{share:.1f}" for share in shares)]
            rows.append([runs[0][1], commit_of(interpreter), mode, *cells, *costs])
    head = f"torch | netfold | call | {' | '.join(SIDES)} | torch / gloo | torch's share | netfold's Python"
    return f"""A 4-byte all_reduce on 2 ranks of one machine, microseconds: the median of rounds' medians, and in
brackets their quartiles. The layers are those of `lab/bench/torch_overhead.py`: torch, as a user calls it; backend, the
method that torch calls; group, without netfold's Python for torch; native, submit and wait alone. {rounds} rounds of
{calls} calls a launch.

{driver.table(head, rows)}"""


if __name__ == "__main__":
    driver.run(torch_overhead)
