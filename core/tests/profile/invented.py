"""Synthetic runs and findings, with as many ranks, steps and operations as a test of the page needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from netfold.profile.findings import (
    BUCKETS,
    Advice,
    ClockOffset,
    Findings,
    Overlap,
    Row,
    StepTimes,
    Straggler,
)
from netfold.profile.record import RECORD
from netfold.profile.run import PROGRESS, STEP, GroupName, RankMetadata, Run, Trace

NAMES: Mapping[str, Mapping[str, str]] = {
    "operation": {"0": "all_reduce", "2": "all_gather", "8": "barrier", "9": "send", "10": "receive"},
    "algorithm": {"2": "ring", "3": "in_network", "6": "tree"},
    "wire": {"0": "f32", "2": "bf16"},
    "dtype": {"0": "f32"},
    "reduce": {"0": "sum"},
    "error": {"0": "none", "4": "timeout"},
}
STEP_NS = 20_000_000
# How far a rank's clock is ahead of the first rank's.
AHEAD_NS = 7_000_000_000_000
SIZES = (4 << 10, 1 << 20, 24 << 20, 80 << 20)


def about(
    rank: int, size: int, *, host: str = "", group: str = "world", ranks: list[int] | None = None
) -> RankMetadata:
    return RankMetadata(
        rank=rank,
        size=size,
        host=host or f"node-{rank // 2}",
        pid=1000 + rank,
        source="event records",
        names=NAMES,
        groups={str(77 + rank): GroupName(group, "netfold", ranks or list(range(size)))},
    )


def run(*, ranks: int = 4, steps: int = 6, calls: int = 8, progress: bool = True, host: str = "") -> Run:
    """Each step: `calls` operations that overlap by pairs, rank 1 late to all; the seventh step is twice as long."""
    traces = []
    for rank in range(ranks):
        random = np.random.default_rng(rank)
        operations = np.zeros(steps * calls, RECORD)
        spans = np.zeros(steps, STEP)
        begin_ns = rank * AHEAD_NS
        for step in range(steps):
            lasts_ns = STEP_NS * (2 if step == 6 else 1)
            spans[step] = (begin_ns, begin_ns + lasts_ns)
            each_ns = lasts_ns // (2 * calls)
            for call in range(calls):
                one = operations[step * calls + call]
                late_ns = each_ns // 3 if rank == 1 else int(random.integers(0, each_ns // 8))
                one["group"], one["sequence"] = 77 + rank, step * calls + call + 1
                one["operation"] = 8 if call == calls - 1 else (0, 0, 0, 2)[call % 4]
                one["bytes"] = 0 if one["operation"] == 8 else SIZES[call % len(SIZES)]
                one["wire_bytes"] = one["bytes"] * 3 // 2
                one["algorithm"] = (2, 3, 6)[call % 3]
                one["queued_ns"] = begin_ns + lasts_ns // 2 + call * each_ns * 9 // 10
                one["started_ns"] = one["queued_ns"] + late_ns
                ended_ns = begin_ns + lasts_ns // 2 + (call + 1) * each_ns + int(random.integers(0, each_ns // 8))
                one["finished_ns"] = min(ended_ns, begin_ns + lasts_ns - 1)
                one["slowest_rank"] = -1
            begin_ns += lasts_ns
        traces.append(Trace(about(rank, ranks, host=host), operations, spans, _progress(spans) if progress else NONE))
    return Run(Path("run"), {}, traces)


NONE = np.zeros(0, PROGRESS)


def _progress(spans: np.ndarray) -> np.ndarray:
    """A line a millisecond; the thread computes for the first six tenths of each step."""
    at = np.arange(spans["began_ns"][0], spans["ended_ns"][-1] + 1, 1_000_000)
    step = np.clip(np.searchsorted(spans["began_ns"], at, side="right") - 1, 0, len(spans) - 1)
    length = spans["ended_ns"] - spans["began_ns"]
    before = np.concatenate(([0], np.cumsum(length * 6 // 10)[:-1]))
    lines = np.zeros(len(at), PROGRESS)
    lines["at_ns"] = at
    lines["busy_ns"] = before[step] + np.minimum(at - spans["began_ns"][step], length[step] * 6 // 10)
    return lines


def clocks(ranks: int) -> list[ClockOffset]:
    return [ClockOffset(rank, -rank * AHEAD_NS, 0 if rank == 0 else 12_000 * rank) for rank in range(ranks)]


def rows() -> list[Row]:
    """A distinct number in every field, so that swapped fields show."""
    found = []
    for index, name in enumerate(("all_reduce", "all_gather", "barrier")):
        for place, to_bytes in enumerate((*BUCKETS, None)):
            if name == "barrier" and place > 0:
                continue
            at = 1 + index * 10 + place
            found.append(
                Row(
                    operation=name,
                    above_bytes=(0, *BUCKETS)[place],
                    to_bytes=to_bytes,
                    count=120 + at,
                    bytes=(1 << 20) * at * 17,
                    total_s=0.31 * at + 0.017,
                    mean_s=0.0011 * at,
                    p50_s=0.0009 * at,
                    p99_s=0.0043 * at,
                    algbw=1.1e8 * at,
                    busbw=1.7e8 * at,
                    share=at / 130,
                    exposed_s=None if name == "barrier" else 0.07 * at,
                    queue_s=0.013 * at,
                    skew_s=None if name == "barrier" else 0.023 * at,
                    algorithms={"ring": 400 + at, "in_network": 30 + at},
                    wires={"f32": 430 + 2 * at},
                    wire_bytes=None if name == "all_gather" else (1 << 20) * at * 29,
                    retransmissions=None if name == "all_gather" else at + 0.5,
                    registration_hits=None if name == "all_gather" else 50.0 + at,
                    registration_misses=None if name == "all_gather" else 3.0 + at,
                    errors=at if name == "barrier" else 0,
                )
            )
    return found


def findings(*, size: int = 4, **changes: object) -> Findings:
    whole = Findings(
        title="torchrun --nproc-per-node 4 train.py --model edsr --batch 16",
        size=size,
        ranks=list(range(size)),
        sources=["event records"],
        backends=["netfold"],
        rows=rows(),
        overall=Overlap(wall_s=91.5, communication_s=34.8, exposed_s=11.2, overlap_ratio=1 - 11.2 / 34.8),
        steps=StepTimes(310, (0.29, 0.27, 0.41), (0.11, 0.1, 0.19), (0.036, 0.03, 0.09)),
        stragglers=[
            Straggler(
                rank, f"node-{rank // 2}", 2400, 1900 if rank == 1 else 100 + rank, 4.2 if rank == 1 else 0.2, 1.3
            )
            for rank in range(size)
        ],
        clocks=clocks(size),
        advice=[
            Advice("rank 1 was the last to begin in 1,900 of 2,400 operations: look at node-0 first", prediction=False),
            Advice("all_reduce above 64 MB in bf16 would take 31 ms instead of 52", prediction=True),
        ],
        coverage_gaps=["what ran on the GPU is not in the records", "messages of less than a microsecond are rounded"],
        lost=0,
        versions={"netfold": "0.1.0", "torch": "2.9.1", "python": "3.12.3"},
        hosts=["node-0", "node-1"],
    )
    return replace(whole, **changes)  # type: ignore[arg-type]


def each_step(count: int) -> list[Overlap]:
    random = np.random.default_rng(5)
    walls = 0.28 + 0.02 * random.random(count)
    walls[count // 3] = 0.55
    return [Overlap(wall, 0.4 * wall, 0.12 * wall, 0.7) for wall in walls.tolist()]
