"""Synthetic runs, small enough to state the right answer in a comment. Times are ms of the first rank's clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from netfold.profile.record import RECORD
from netfold.profile.run import PROGRESS, STEP, GroupName, RankMetadata, RankWriter, Run, Trace

KB, MB = 1 << 10, 1 << 20
EVENTS, PROFILER = "event records", "torch profiler"
# As the native engine numbers them; `core/tests/profile` reads them there where it is built.
OPERATIONS = (
    *("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "reduce", "gather", "scatter"),
    *("barrier", "send", "receive"),
)
ALGORITHMS = (
    *("local", "direct", "ring", "in_network", "shared_memory", "halving_doubling", "tree", "hierarchical", "bruck"),
    *("pairwise", "chain", "point_to_point", "split"),
)
DTYPES = ("f32", "f64", "f16", "bf16", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64")
ERRORS = ("none", "peer_lost", "switch_lost", "mismatch", "timeout", "aborted", "system")
REDUCES = ("sum", "product", "min", "max")
NAMES = {
    "operation": OPERATIONS,
    "algorithm": ALGORITHMS,
    "dtype": DTYPES,
    "wire": DTYPES,
    "reduce": REDUCES,
    "error": ERRORS,
}


@dataclass(frozen=True)
class Op:
    """One operation of one rank. queued_ms: None for at once; sequence: None for its place in the group (from 1)."""

    started_ms: float
    finished_ms: float
    bytes: int = MB
    operation: str = "all_reduce"
    group: str = "world"
    queued_ms: float | None = None
    sequence: int | None = None
    algorithm: str = "ring"
    dtype: str = "f32"
    wire: str = "f32"
    wire_bytes: int = 0
    retransmissions: int = 0
    registration: tuple[int, int] = (0, 0)
    error: str = "none"
    slowest_rank: int = -1


def make_trace(
    rank: int,
    size: int,
    operations: Sequence[Op] = (),
    *,
    steps_ms: Sequence[tuple[float, float]] = (),
    progress_ms: Sequence[tuple[float, float]] = (),
    clock_ms: float = 0,
    host: str | None = None,
    groups: Mapping[str, Sequence[int]] | None = None,
    source: str = EVENTS,
    backends: Mapping[str, str] | None = None,
    coverage_gaps: Sequence[str] = (),
    lost: int = 0,
) -> Trace:
    """progress_ms: (at, computed so far). clock_ms: how far this rank's clock is ahead of the first rank's.

    backends: by name of a group; else netfold, or gloo for the profiler's records. host: one of its own where None.
    groups: name -> ranks, `world` of all where None; the records of every rank give a group another number, as
    real ranks do.
    """
    named = dict(groups or {"world": range(size)})
    number = {name: 1000 * (rank + 1) + index for index, name in enumerate(named)}
    records = np.zeros(len(operations), RECORD)
    taken: dict[str, int] = {}
    for record, op in zip(records, operations, strict=True):
        taken[op.group] = taken.get(op.group, 0) + 1
        record["group"] = number[op.group]
        record["sequence"] = taken[op.group] if op.sequence is None else op.sequence
        record["queued_ns"] = _ns(op.started_ms if op.queued_ms is None else op.queued_ms, clock_ms)
        record["started_ns"] = _ns(op.started_ms, clock_ms)
        record["finished_ns"] = _ns(op.finished_ms, clock_ms)
        for name in ("bytes", "wire_bytes", "retransmissions", "slowest_rank"):
            record[name] = getattr(op, name)
        record["registration_hits"], record["registration_misses"] = op.registration
        for name in ("operation", "algorithm", "dtype", "wire", "error"):
            record[name] = NAMES[name].index(getattr(op, name))
    names = {what: {str(index): name for index, name in enumerate(all_of)} for what, all_of in NAMES.items()}
    if source == PROFILER:
        names |= {"algorithm": {}, "wire": {}}
    about = RankMetadata(
        rank=rank,
        size=size,
        host=f"host-{rank}" if host is None else host,
        pid=1000 + rank,
        source=source,
        names=names,
        groups={
            str(number[name]): GroupName(
                name, (backends or {}).get(name, "netfold" if source == EVENTS else "gloo"), list(ranks)
            )
            for name, ranks in named.items()
        },
        coverage_gaps=list(coverage_gaps),
        versions={"netfold": "0.1.0"},
        lost=lost,
    )
    steps = np.array([(_ns(began, clock_ms), _ns(ended, clock_ms)) for began, ended in steps_ms], STEP)
    progress = np.array([(_ns(at, clock_ms), round(busy * 1e6)) for at, busy in progress_ms], PROGRESS)
    return Trace(about, records, steps, progress)


def make_run(*traces: Trace, **description: Any) -> Run:
    """In memory: nothing of it is on disk."""
    return Run(Path("RUN"), description, sorted(traces, key=lambda trace: trace.metadata.rank))


def write_run(run: Run, folder: Path) -> Path:
    """As its ranks would have left it in `folder`."""
    import json

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(run.description))
    for trace in run.traces:
        writer = RankWriter(folder, trace.metadata)
        for name in ("operations", "steps", "progress"):
            writer.append(name, getattr(trace, name))
        writer.close()
    return folder


def training(size: int = 4, steps: int = 20, *, late: int | None = None, seed: int = 0) -> Run:
    """A job that looks like one, for pages and tables: in each step of 100 ms five gradients' all_reduces, of 25 MB and
    one of 80 KB, behind 60 ms of computing that hides a part of them, a broadcast before the first; clocks apart by
    seconds. `late`: a rank that begins every operation 8 ms after the other ranks.
    """
    rng = np.random.default_rng(seed)
    operations: list[list[Op]] = [[] for _ in range(size)]
    begun = rng.uniform(0, 0.2, (steps + 1, 6, size))
    if late is not None:
        begun[1:, :, late] += 8
    for rank in range(size):
        operations[rank].append(Op(begun[0, 0, rank], 2 + begun[0, 1, rank], 4 * MB, "broadcast", algorithm="chain"))
    for step in range(steps):
        free = 0.0
        for index in range(6):
            at = 10 + 100 * step + 12 * index
            started = np.maximum(at + begun[step + 1, index], free)
            free = float(started.max()) + (1.5 if index == 5 else 14 + rng.uniform(0, 1))
            for rank in range(size):
                operations[rank].append(
                    Op(
                        float(started[rank]),
                        free + rng.uniform(0, 0.1),
                        80 * KB if index == 5 else 25 * MB,
                        queued_ms=at + float(begun[step + 1, index, rank]),
                        wire_bytes=2 * 25 * MB * (size - 1) // size,
                    )
                )
    computed = [(t, 60 * (t // 100) + min(t % 100, 60)) for t in range(0, 100 * steps + 1, 5)]
    return make_run(
        *(
            make_trace(
                rank,
                size,
                operations[rank],
                steps_ms=[(100 * step, 100 * step + 99) for step in range(steps)],
                progress_ms=computed,
                clock_ms=0 if rank == 0 else float(rng.uniform(-5000, 5000)),
            )
            for rank in range(size)
        ),
        command=["python", "train.py"],
    )


def _ns(at_ms: float, clock_ms: float) -> int:
    """No time is 0, because a host has been up for some time when a job begins."""
    return round((at_ms + clock_ms) * 1e6) + 100_000_000_000
