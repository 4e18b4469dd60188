"""Compute how much communication is hidden by computing.

A rank communicates while at least one of its operations is under way, from start to finish. Queueing time does not
count: another operation is under way then. Communication is exposed while the training thread does not compute. Other
waits (for data, for a disk) are not communication.

Between two lines of PROGRESS the thread computed for the increase of `busy_ns`. The moments are unknown, so the idle
rest is spread evenly over the time between the two lines, and split where operations begin and end. Lines are
milliseconds apart. So an operation of microseconds gets its share of such an interval, which is right on average.
Before the first line and after the last one, the thread was not watched: all communication there counts as exposed.

Of an operation on a device, possibly only the submission is recorded (`columns.completes`). Its time under way is then
unknown, so it is left out. If a rank has only submissions, its communication is unknown.

If k operations are under way at once, each gets 1/k of the exposed time, so that the operations add up to the total.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from netfold.profile.columns import Floats, Integers, completes
from netfold.profile.findings import Overlap, StepTimes
from netfold.profile.run import Run, Trace


@dataclass(frozen=True)
class RankOverlap:
    """The overlap of one rank, as cumulative sums in seconds, [E], at the edges.

    communicated, exposed and of_one are None with submissions only; exposed and of_one also without progress lines.
    """

    edges_ns: Integers  # [E], ascending: the times at which any value changes
    communicated: Floats | None  # time with an operation under way
    exposed: Floats | None  # of that time, without computing
    of_one: Floats | None  # the exposed time of each single operation under way
    unwatched_s: float  # communication outside of the progress lines

    def between(self, what: Floats, begun_ns: Integers, ended_ns: Integers) -> Floats:
        """The part of a cumulative sum in each of [n] intervals."""
        grown: Floats = np.interp(ended_ns, self.edges_ns, what) - np.interp(begun_ns, self.edges_ns, what)
        return grown

    def of_operations(self, trace: Trace) -> Floats | None:
        """[n] exposed seconds of each record, 0 for a submission. They add up to the rank's exposed time."""
        if self.of_one is None:
            return None
        records = trace.operations
        return np.where(completes(trace), self.between(self.of_one, records["started_ns"], records["finished_ns"]), 0.0)


def find_overlap(trace: Trace) -> RankOverlap:
    """Compute one rank's overlap. Cost: sorting the rank's records and progress lines."""
    timed = trace.operations[completes(trace)]
    started, finished = timed["started_ns"], timed["finished_ns"]
    lines = trace.progress
    watched = len(lines) > 1
    # Equal edges make an interval of length 0, which is harmless.
    edges = np.sort(np.concatenate([started, finished, lines["at_ns"]]))
    if not len(edges):
        edges = np.zeros(1, np.int64)
    if not len(timed) and len(trace.operations):
        return RankOverlap(edges, None, None, None, 0.0)
    under_way = np.zeros(len(edges), np.int64)
    np.add.at(under_way, np.searchsorted(edges, started), 1)
    np.add.at(under_way, np.searchsorted(edges, finished), -1)
    under_way = np.cumsum(under_way)[:-1]
    seconds = np.diff(edges) / 1e9
    communicating = np.where(under_way > 0, seconds, 0)
    if not watched:
        return RankOverlap(edges, _sums(communicating), None, None, float(communicating.sum()))
    idle = 1 - np.diff(lines["busy_ns"]) / np.maximum(np.diff(lines["at_ns"]), 1)
    # For each interval, its place between two lines. Before and after all lines, nothing is hidden.
    idle = np.concatenate([[1.0], np.clip(idle, 0, 1), [1.0]])
    line = np.searchsorted(lines["at_ns"], edges[:-1], side="right")
    exposed = communicating * idle[line]
    unseen = (line == 0) | (line == len(lines))
    return RankOverlap(
        edges,
        _sums(communicating),
        _sums(exposed),
        _sums(exposed / np.maximum(under_way, 1)),
        float(communicating[unseen].sum()),
    )


def mean_overlap(run: Run, exposures: list[RankOverlap]) -> Overlap:
    """Average over ranks. Exposed time and the ratio use the watched ranks only.

    Ranks with submissions only contribute to the wall time only.
    """
    if not run.traces:
        return Overlap(0.0, 0.0, None, None)
    wall_s = float(np.mean([_wall_s(trace) for trace in run.traces]))
    return _overlap(wall_s, [(each.communicated, each.exposed) for each in exposures], -1)


def _overlap(wall_s: float, of_ranks: list[tuple[Floats | None, Floats | None]], at: int) -> Overlap:
    """of_ranks: communication, and its exposed part; seconds, of which number `at` counts. None: unknown."""
    ranks = [
        (float(communicated[at]), None if exposed is None else float(exposed[at]))
        for communicated, exposed in of_ranks
        if communicated is not None
    ]
    if not ranks:
        return Overlap(wall_s, None, None, None)
    watched = [(communication, exposed) for communication, exposed in ranks if exposed is not None]
    exposed_s = float(np.mean([exposed for _, exposed in watched])) if watched else None
    hidden_from = float(np.mean([communication for communication, _ in watched])) if watched else 0.0
    ratio = 1 - exposed_s / hidden_from if exposed_s is not None and hidden_from > 0 else None
    return Overlap(wall_s, float(np.mean([communication for communication, _ in ranks])), exposed_s, ratio)


def step_times(run: Run, exposures: list[RankOverlap]) -> StepTimes | None:
    """The step times over all ranks' steps; None if no rank recorded steps."""
    ranks = [_steps_of(trace, exposure) for trace, exposure in zip(run.traces, exposures, strict=True)]
    count = max((len(wall) for wall, _, _ in ranks), default=0)
    if not count:
        return None
    communication = [each for _, each, _ in ranks if each is not None]
    exposed = [each for _, _, each in ranks if each is not None]
    return StepTimes(
        count,
        _spread([wall for wall, _, _ in ranks]),
        _spread(communication) if sum(map(len, communication)) else None,
        _spread(exposed) if sum(map(len, exposed)) else None,
    )


def each_step(run: Run) -> list[Overlap]:
    """The overlap of each step, in order: means over the ranks with that step."""
    ranks = [_steps_of(trace, find_overlap(trace)) for trace in run.traces]
    overlaps = []
    for number in range(max((len(wall) for wall, _, _ in ranks), default=0)):
        there = [rank for rank in ranks if len(rank[0]) > number]
        wall_s = float(np.mean([wall[number] for wall, _, _ in there]))
        overlaps.append(_overlap(wall_s, [each[1:] for each in there], number))
    return overlaps


def _steps_of(trace: Trace, exposure: RankOverlap) -> tuple[Floats, Floats | None, Floats | None]:
    """Seconds of each of a rank's steps: in total, with communication, and with exposed communication."""
    begun, ended = trace.steps["began_ns"], trace.steps["ended_ns"]
    communicated, exposed = (
        None if what is None else exposure.between(what, begun, ended)
        for what in (exposure.communicated, exposure.exposed)
    )
    return (ended - begun) / 1e9, communicated, exposed


def _wall_s(trace: Trace) -> float:
    """From the first step or operation to the last: a process also starts and ends, which is no training."""
    operations, steps = trace.operations, trace.steps
    begins = np.concatenate([operations["queued_ns"], steps["began_ns"]])
    ends = np.concatenate([operations["finished_ns"], steps["ended_ns"]])
    return float(ends.max() - begins.min()) / 1e9 if len(begins) else 0.0


def _spread(values: list[Any]) -> tuple[float, float, float]:
    median, p5, p95 = np.percentile(np.concatenate(values), (50, 5, 95))
    return float(median), float(p5), float(p95)


def _sums(values: Floats) -> Floats:
    return np.concatenate([[0.0], np.cumsum(values)])
