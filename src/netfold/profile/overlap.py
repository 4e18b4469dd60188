"""How much of communication computing hides.

A rank communicates while at least one of its operations is under way, from start to finish; one that is queued behind
another is covered by that one. Communication is exposed as far as the training thread does not compute meanwhile.
Waiting for anything else (data, a disk) outside of operations is no communication, and does not count.

Between two lines of PROGRESS the thread computed for as long as `busy_ns` grew: at what moments is not known, so the
rest is spread evenly over the time between the two, and cut where operations begin and end. Lines are milliseconds
apart; an operation of microseconds has its share of such a time, right on the average of many. Before the first line
and after the last one nobody watched: nothing is known to hide communication there, and it counts as exposed.

Of an operation on a device only the submission by the host may be recorded (`columns.completes`). How long it was under
way is then not known, so it is left out, and where a rank has nothing else its communication is not known.

Where k operations are under way at once each has 1/k of that moment's exposed time, so that operations add up to it.
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
    """Of one rank. edges_ns: [E], never falling, where anything changes; the rest [E], in seconds, sums up to there.

    communicated: with an operation under way; exposed: of that, without computing; of_one: the share of each operation
    that is under way; unwatched_s: of communication, without a line of progress around it. exposed, of_one: None where
    nobody watched. communicated, exposed, of_one: None where there are submissions and nothing else.
    """

    edges_ns: Integers
    communicated: Floats | None
    exposed: Floats | None
    of_one: Floats | None
    unwatched_s: float

    def between(self, what: Floats, begun_ns: Integers, ended_ns: Integers) -> Floats:
        """How much of a sum falls into each of [n] times, whose ends may lie anywhere."""
        grown: Floats = np.interp(ended_ns, self.edges_ns, what) - np.interp(begun_ns, self.edges_ns, what)
        return grown

    def of_operations(self, trace: Trace) -> Floats | None:
        """[n] seconds of each of the rank's records, 0 of a submission; they add up to the rank's exposed time."""
        if self.of_one is None:
            return None
        records = trace.operations
        return np.where(completes(trace), self.between(self.of_one, records["started_ns"], records["finished_ns"]), 0.0)


def find_overlap(trace: Trace) -> RankOverlap:
    """Cost: sorting the rank's records and lines."""
    timed = trace.operations[completes(trace)]
    started, finished = timed["started_ns"], timed["finished_ns"]
    lines = trace.progress
    watched = len(lines) > 1
    # Twice the same is an interval of no time.
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
    # Which two lines an edge's interval lies between; before and after all of them nothing is hidden.
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
    """Means over ranks; exposed time over those that were watched, and their communication for the ratio. Ranks that
    recorded submissions alone are in the wall time only."""
    if not run.traces:
        return Overlap(0.0, 0.0, None, None)
    sums = [
        (float(each.communicated[-1]), None if each.exposed is None else float(each.exposed[-1]))
        for each in exposures
        if each.communicated is not None
    ]
    return _overlap(float(np.mean([_wall_s(trace) for trace in run.traces])), sums)


def _overlap(wall_s: float, ranks: list[tuple[float, float | None]]) -> Overlap:
    """ranks: communication, and what of it was exposed, None where nobody watched."""
    if not ranks:
        return Overlap(wall_s, None, None, None)
    watched = [(communication, exposed) for communication, exposed in ranks if exposed is not None]
    exposed_s = float(np.mean([exposed for _, exposed in watched])) if watched else None
    hidden_from = float(np.mean([communication for communication, _ in watched])) if watched else 0.0
    ratio = 1 - exposed_s / hidden_from if exposed_s is not None and hidden_from > 0 else None
    return Overlap(wall_s, float(np.mean([communication for communication, _ in ranks])), exposed_s, ratio)


def step_times(run: Run, exposures: list[RankOverlap]) -> StepTimes | None:
    """Of all ranks' steps together; None where no rank says what a step is."""
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
    """Of each step, in order, means over the ranks that have one of its number."""
    ranks = [_steps_of(trace, find_overlap(trace)) for trace in run.traces]
    found = []
    for number in range(max((len(wall) for wall, _, _ in ranks), default=0)):
        there = [rank for rank in ranks if len(rank[0]) > number]
        sums = [
            (float(communication[number]), None if exposed is None else float(exposed[number]))
            for _, communication, exposed in there
            if communication is not None
        ]
        found.append(_overlap(float(np.mean([wall[number] for wall, _, _ in there])), sums))
    return found


def _steps_of(trace: Trace, exposure: RankOverlap) -> tuple[Floats, Floats | None, Floats | None]:
    """Seconds of each of a rank's steps: all of it, with communication, and with exposed communication."""
    begun, ended = trace.steps["began_ns"], trace.steps["ended_ns"]
    communicated, exposed = (
        None if what is None else exposure.between(what, begun, ended)
        for what in (exposure.communicated, exposure.exposed)
    )
    return (ended - begun) / 1e9, communicated, exposed


def _wall_s(trace: Trace) -> float:
    operations, steps, progress = trace.operations, trace.steps, trace.progress
    begins = np.concatenate([operations["queued_ns"], steps["began_ns"], progress["at_ns"]])
    ends = np.concatenate([operations["finished_ns"], steps["ended_ns"], progress["at_ns"]])
    return float(ends.max() - begins.min()) / 1e9 if len(begins) else 0.0


def _spread(values: list[Any]) -> tuple[float, float, float]:
    median, p5, p95 = np.percentile(np.concatenate(values), (50, 5, 95))
    return float(median), float(p5), float(p95)


def _sums(values: Floats) -> Floats:
    return np.concatenate([[0.0], np.cumsum(values)])
