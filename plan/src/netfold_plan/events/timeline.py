"""The timeline of a simulated step: as a list, and as a file for ui.perfetto.dev.

The file has the format of `netfold profile export --perfetto`: one process per rank, its operations with group,
sequence and bytes, and arrows through the slices of one call. A measured run can be in the same file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from netfold.profile.findings import ClockOffset
from netfold.profile.perfetto import merge_traces, trace_events, work_events, write_events
from netfold.profile.record import RECORD
from netfold.profile.run import PROGRESS, STEP, GroupName, RankMetadata, Run, Trace
from netfold_plan.events.schedule import FORWARD
from netfold_plan.events.simulate import Simulated

# Kinds of slices with other ranks.
_COMMUNICATION = ("tensor", "data", "tables", "send", "receive")
_NUMBERS = {"all_reduce": 0, "all_gather": 2, "reduce_scatter": 3, "all_to_all": 4, "send": 9, "receive": 10}
# The record of these has the bytes of one rank's block.
_BLOCKS = ("all_gather", "reduce_scatter")
_GROUPS = ("tensor", "data", "pipeline", "tables")


@dataclass(frozen=True)
class Slice:
    """kind: forward, backward, weights or optimizer; for collectives tensor, data or tables; send or receive."""

    rank: int
    kind: str
    name: str
    start_s: float
    end_s: float
    size_bytes: float = 0.0

    @property
    def is_work(self) -> bool:
        return self.kind not in _COMMUNICATION


def timeline(simulated: Simulated, ranks: Iterable[int]) -> list[Slice]:
    """The slices of each rank in the order of their begin. Raises ValueError for a rank that is not in the job.

    Collectives of tensor ranks are spread evenly over a pass, as they are over its layers.
    """
    return [each for rank in ranks for each in _slices(simulated, rank)]


def write_timeline(
    simulated: Simulated,
    ranks: Sequence[int],
    path: Path,
    *,
    beside: Run | None = None,
    clocks: Iterable[ClockOffset] = (),
    step: int = 0,
) -> int:
    """Write a file, and return its number of events. Raises ValueError as `timeline` does, and OSError.

    beside: a measured run for the same file; the simulated step begins where the measured one of number `step` does.
    clocks: of the measured run, as `analyse` finds them.
    """
    events = _events(simulated, ranks, path.parent)
    if beside is not None:
        events = merge_traces(trace_events(beside, clocks), events, step)
    return write_events(events, path)


def _events(simulated: Simulated, ranks: Sequence[int], folder: Path) -> Iterator[dict[str, Any]]:
    by_rank = {rank: _slices(simulated, rank) for rank in ranks}
    run = Run(folder, {}, [_trace(simulated, rank, mine) for rank, mine in by_rank.items()])
    yield from trace_events(run, ())
    for trace in run.traces:
        work = [each for each in by_rank[trace.metadata.rank] if each.is_work]
        yield from work_events(trace, [(each.name, *_ns(each)) for each in work])


def _slices(simulated: Simulated, rank: int) -> list[Slice]:
    if not 0 <= rank < simulated.job.split.ranks:
        raise ValueError(f"there is no rank {rank}; ranks are 0 to {simulated.job.split.ranks - 1}")
    slices = [*_passes(simulated, rank), *_messages(simulated, rank), *_reductions(simulated, rank)]
    return sorted(slices, key=lambda each: (each.start_s, each.end_s))


def _passes(simulated: Simulated, rank: int) -> Iterator[Slice]:
    built, times = simulated.built, simulated.times
    lane = built.mesh.lane_of(rank)
    tasks = built.task_info[lane // built.mesh.replicas]
    began_s = 0.0
    for at, task in enumerate(tasks):
        if task.part == 0:
            began_s = times.began_s[lane][at]
        if not task.is_last:
            continue
        ended_s = times.ended_s[lane][at]
        yield Slice(rank, task.turn.kind, task.turn.text(), began_s, ended_s)
        tables_s = task.tables_s * task.parts
        if tables_s > 0:
            # Looked-up values arrive before the layers above begin; their gradients leave after these layers.
            start_s = began_s if task.turn.kind == FORWARD else ended_s - tables_s
            yield Slice(rank, "tables", "all_to_all", start_s, start_s + tables_s)
        tensor_s = min(task.tensor_s * task.parts, ended_s - began_s)
        count = built.collectives if tensor_s > 0 else 0
        for number in range(count):
            # Each collective follows its part of the computing.
            end_s = began_s + (ended_s - began_s) * (number + 1) / count
            yield Slice(rank, "tensor", "all_reduce", end_s - tensor_s / count, end_s)


def _messages(simulated: Simulated, rank: int) -> Iterator[Slice]:
    built, times = simulated.built, simulated.times
    replicas, stages = built.mesh.replicas, simulated.job.split.pipeline
    stage, replica = divmod(built.mesh.lane_of(rank), replicas)
    for other in {stage, (stage + 1) % stages, (stage - 1) % stages}:
        lane = other * replicas + replica
        for at, task in enumerate(built.step.tasks[other]):
            start_s, end_s = times.sent_s[lane][at], times.arrived_s[lane][at]
            if start_s < 0 or task.gives is None or (other != stage and task.gives[0] != stage):
                continue
            turn = built.task_info[other][at].turn
            what = "activations" if turn.kind == FORWARD else "gradients"
            # Gradients are as large as the activations in the other direction.
            sender = other if turn.kind == FORWARD else (other - 1) % stages
            size = simulated.prediction.stages[sender].sent_bytes
            kind = "send" if other == stage else "receive"
            yield Slice(rank, kind, f"{kind} {what} {turn.microbatch}", start_s, end_s, size)


def _reductions(simulated: Simulated, rank: int) -> Iterator[Slice]:
    built, times = simulated.built, simulated.times
    lane = built.mesh.lane_of(rank)
    stage = lane // built.mesh.replicas
    for bucket, (start_s, end_s) in zip(built.buckets[stage], times.buckets_s[stage], strict=True):
        yield Slice(rank, "data", bucket.operation, start_s, end_s, bucket.size_bytes)
    yield Slice(rank, "optimizer", "optimizer", *times.update_s[lane])
    gather = built.updated[stage]
    if gather is not None:
        yield Slice(rank, "data", gather.operation, *times.gather_s[stage], gather.size_bytes)


def _trace(simulated: Simulated, rank: int, slices: Sequence[Slice]) -> Trace:
    """The trace that a profile of the rank would have."""
    operations = [each for each in slices if not each.is_work]
    records = np.zeros(len(operations), RECORD)
    counts = dict.fromkeys(_GROUPS, 0)
    for record, each in zip(records, operations, strict=True):
        group = each.kind if each.kind in counts else "pipeline"
        record["group"], record["sequence"] = _GROUPS.index(group), counts[group]
        counts[group] += 1
        operation = each.kind if group == "pipeline" else each.name
        record["operation"], record["slowest_rank"] = _NUMBERS[operation], -1
        record["bytes"] = each.size_bytes / (simulated.job.split.data if operation in _BLOCKS else 1)
        record["started_ns"], record["finished_ns"] = _ns(each)
        record["queued_ns"] = record["started_ns"]
    about = RankMetadata(
        rank=rank,
        size=simulated.job.split.ranks,
        host="a predicted cluster",
        pid=0,
        source="event records",
        names={"operation": {str(number): name for name, number in _NUMBERS.items()}},
        groups={
            str(number): GroupName(name, "predicted", _members(simulated, rank, name))
            for number, name in enumerate(_GROUPS)
        },
    )
    step = np.array([(0, round(simulated.times.end_s * 1e9))], STEP)
    return Trace(about, records, step, np.zeros(0, PROGRESS))


def _members(simulated: Simulated, rank: int, group: str) -> list[int]:
    split = simulated.job.split
    stride, count = {
        "tensor": (1, split.tensor),
        "data": (split.tensor, split.data),
        "pipeline": (split.tensor * split.data, split.pipeline),
        "tables": (1, split.ranks),
    }[group]
    first = rank - rank // stride % count * stride
    return list(range(first, first + stride * count, stride))


def _ns(each: Slice) -> tuple[int, int]:
    return round(each.start_s * 1e9), round(each.end_s * 1e9)
