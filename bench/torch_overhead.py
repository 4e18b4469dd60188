"""Measure what torch and netfold's Python cost a call: a 4-byte all_reduce on 2 ranks, layer by layer, beside gloo.

    .venv/bin/python bench/torch_overhead.py [--python PYTHON ...] [--runs 5] [--rounds 20] [--calls 200] [--write]

Layers of netfold, each a whole all_reduce between the two ranks, entered one layer deeper:

- torch    `torch.distributed.all_reduce`, as a user calls it;
- backend  the method that torch calls (`Operations.allreduce`): without torch's own Python and dispatch;
- group    `Group.run_in_place` or `Group.start_in_place`: without netfold's Python for torch;
- native   the native group's `submit` and `wait` alone.

Layers and gloo take turns within a round, in the other order each time; both ranks leave one start line before a turn.
A sync call is timed as a whole. Of an async call "submit" is the time until the Work is there, "in all" with its wait.
`--python` names interpreters of environments with other versions of torch (each with netfold): their runs take turns,
so that all of them meet the same machine. Variables may stand before it: `--python "TORCH_FR_BUFFER_SIZE=0 PYTHON"`.
`--write` rewrites bench/results/torch_overhead.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from own_ranks import run_own_ranks

from netfold.bench.start_line import StartLine

RESULT = Path(__file__).parent / "results" / "torch_overhead.md"
SIDES = ("gloo", "torch", "backend", "group", "native")
MODES = ("sync", "submit", "in all")
DEADLINE_S = 600
NS = 1e-9


def operations(group: Any) -> Any:
    """The Python object whose methods torch calls."""
    try:
        from netfold.torch.operations import operations_of
    except ImportError:  # netfold before torch 2.14 was supported: the group itself
        return group
    return operations_of(group)


def caller(side: str, groups: dict[str, Any], tensor: Any, async_op: bool) -> Any:
    """A function without arguments: one all_reduce on this side. Async: it returns what waits for it."""
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
            return lambda: netfold.run_in_place(kind, dtype, reduce, average, region)

        def start() -> Any:
            operation = netfold.start_in_place(kind, dtype, reduce, average, region, None, wait_here=False)
            return lambda: netfold.wait(operation)

        return start
    native, regions, limit_ns = netfold._native, (region,), int(netfold.timeout_s / NS)

    def submit() -> Any:
        operation = native.submit(kind, dtype, reduce, average, 0, (), regions, limit_ns, not async_op)
        if async_op:
            return lambda: native.wait(operation, -1)
        if not operation.done:
            native.wait(operation, -1)
        return None

    return submit


def serve(rank: int, size: int, folder: str, rounds: int, calls: int) -> None:
    """A rank: nanoseconds of each call into a file, [side, mode, round, call]."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("netfold", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    groups = {"netfold": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    line = StartLine(Path(folder, "line"), rank, size)
    took = np.zeros((len(SIDES), len(MODES), rounds + 1, calls), dtype=np.int64)
    tensor = torch.ones(1)
    clock = time.perf_counter_ns
    for turn in range(rounds + 1):  # the first is not counted
        for side in SIDES if turn % 2 else SIDES[::-1]:
            place = SIDES.index(side)
            for async_op in (False, True):
                call = caller(side, groups, tensor, async_op)
                tensor.fill_(1.0)
                line.cross()
                if not async_op:
                    for index in range(calls):
                        began = clock()
                        call()
                        took[place, 0, turn, index] = clock() - began
                else:
                    for index in range(calls):
                        began = clock()
                        wait = call()
                        submitted = clock()
                        wait()
                        took[place, 1, turn, index] = submitted - began
                        took[place, 2, turn, index] = clock() - began
                assert tensor.item() == float(size) ** calls or not torch.isfinite(tensor), f"{side}: {tensor}"
    np.save(f"{folder}/{rank}.npy", took[:, :, 1:])
    line.cross()
    dist.destroy_process_group()


def measure(rounds: int, calls: int) -> dict[str, Any]:
    """One run with this interpreter's torch: by side and mode the median nanoseconds of each round's calls."""
    import torch

    size = 2
    with tempfile.TemporaryDirectory(prefix="netfold-overhead-") as folder:
        StartLine.draw(Path(folder, "line"), size)
        run_own_ranks(__file__, size, size, folder, rounds, calls, deadline_s=DEADLINE_S)
        both = np.stack([np.load(f"{folder}/{rank}.npy") for rank in range(size)])
    medians = np.median(both, axis=-1).mean(axis=0)  # [side, mode, round]
    return {"torch": torch.__version__, "medians": medians.tolist()}


def render(found: list[tuple[str, str, np.ndarray[Any, Any]]], note: str) -> str:
    """`found`: torch's version, netfold's commit, medians [side, mode, round] in ns of all runs."""
    lines = [
        "# What a call costs",
        "",
        "A 4-byte all_reduce on 2 ranks of one machine, microseconds: the median of rounds' medians, and in brackets",
        "their quartiles. The layers are those of `bench/torch_overhead.py`: torch, as a user calls it; backend, the",
        "method that torch calls; group, without netfold's Python for torch; native, submit and wait alone.",
        "",
        "| torch | netfold | call | gloo | torch | backend | group | native | torch / gloo "
        "| torch's share | netfold's Python |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for version, commit, medians in found:
        for mode, name in enumerate(MODES):
            cells = []
            middle = {}
            for place, side in enumerate(SIDES):
                values = medians[place, mode] / 1e3
                low, middle[side], high = np.percentile(values, (25, 50, 75))
                cells.append(f"{middle[side]:.1f} [{low:.1f}, {high:.1f}]")
            ratio = np.median(medians[1, mode] / medians[0, mode])
            shares = (middle["torch"] - middle["backend"], middle["backend"] - middle["native"])
            lines.append(
                f"| {version} | {commit} | {'sync' if name == 'sync' else f'async, {name}'} | {' | '.join(cells)} "
                f"| {ratio:.2f} | {shares[0]:.1f} | {shares[1]:.1f} |"
            )
    lines += ["", note]
    return "\n".join(lines) + "\n"


def commit_of(python: str) -> str:
    """Of the tree that an environment's netfold stands in; its version where that is no checkout."""
    script = "import netfold, importlib.metadata as m; print(netfold.__file__); print(m.version('netfold'))"
    where, version = subprocess.run(
        [shlex.split(python)[-1], "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()
    ended = subprocess.run(
        ["git", "-C", str(Path(where).parent), "describe", "--always", "--dirty=+"], capture_output=True, text=True
    )
    return ended.stdout.strip() or version


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["rank"]:
        rank, size, folder, rounds, calls = arguments[1:]
        return serve(int(rank), int(size), folder, int(rounds), int(calls))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", metavar="PYTHON", help="an environment's; this one by default")
    parser.add_argument("--runs", type=int, default=5, help="of each interpreter, in turns")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # a run, printed as JSON
    asked = parser.parse_args(arguments)
    if asked.one:
        print(json.dumps(measure(asked.rounds, asked.calls)))
        return None
    pythons = asked.python or [sys.executable]
    load = [os.getloadavg()[0]]
    medians: dict[str, list[Any]] = {python: [] for python in pythons}
    versions = {}
    for _ in range(asked.runs):
        for python in pythons:
            *variables, interpreter = shlex.split(python)
            command = ["env", *variables, interpreter, "-W", "ignore", __file__, "--one"]
            command += ["--rounds", str(asked.rounds), "--calls", str(asked.calls)]
            ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=DEADLINE_S)
            one = json.loads(ended.stdout.splitlines()[-1])
            versions[python] = " ".join([one["torch"].partition("+")[0], *variables])
            medians[python].append(one["medians"])
    load.append(os.getloadavg()[0])
    found = [
        (versions[python], commit_of(python), np.concatenate([np.array(each) for each in medians[python]], axis=-1))
        for python in pythons
    ]
    note = (
        f"{asked.runs} runs of each environment in turns, {asked.rounds} rounds of {asked.calls} calls a run; "
        f"{os.cpu_count()} cores, load {load[0]:.1f} to {load[1]:.1f}."
    )
    text = render(found, note)
    print(text)
    if asked.write:
        RESULT.write_text(text)
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
