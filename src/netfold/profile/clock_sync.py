"""What to add to each rank's times to have the first rank's, found in the operations themselves.

In a meeting (`matching.meetings`) nobody finishes before all have begun, so for any ranks i and j, with offsets o:

    finished_i + o_i >= started_j + o_j,   that is   o_j - o_i <= finished_i - started_j

Each operation bounds each pair both ways. Those bounds are a system of difference constraints: the tightest that follow
are shortest paths, and the middles of what is left for each rank against the first satisfy all of them together (add
d(first, j) <= d(first, i) + d(i, j) to d(i, first) <= d(i, j) + d(j, first)). Ranks of one host share CLOCK_MONOTONIC:
they are one clock here, and exact. The middle is no more likely than the rest: what is said of it is its bound.

Clocks drift. Offsets are therefore found at *knots*, a fraction of a second apart, each from the whole run: a bound
that was seen t seconds away counts there with t * drift added. That is sound as long as no two clocks drift apart
faster, and lets an offset follow a line, or anything else (Duda et al., ICDCS 1987, fit one line to such bounds). 100
ppm is what two free quartzes do; where the bounds contradict one another with that, 1000 ppm, the most that adjtimex
lets two clocks be slewed apart. Where they still do, a clock was stepped (a virtual machine was moved, say), or two
machines call themselves by one name: those knots have no answer, and what happened near them is not compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from netfold.profile.columns import Bools, Columns, Floats, Integers
from netfold.profile.findings import ClockOffset
from netfold.profile.matching import Matched, synchronising_operations
from netfold.profile.run import Run

_DRIFTS = (100e-6, 1000e-6)
_SPACING_NS = 100_000_000
# Of knots times pairs of hosts: what bounds a system's memory (8 bytes each), for wide jobs by fewer knots.
_MOST_BOUNDS = 1 << 22
_NEVER = math.inf
_FAR_NS = 1e18


@dataclass(frozen=True)
class ClockSync:
    """hosts: [ranks] which clock a trace goes by, 0 the first rank's. knots_ns: [K] on the first clock, ascending,
    each reach_ns from both ends of its part of the run.

    offsets_ns: [K, H], to be added; errors_ns: [K, H, H], how far the difference of two offsets may be off, infinite
    where nothing bounds it; drift: by which bounds were let out a second; contradiction_ns: by how much the worst of
    the bounds contradict one another, 0 if they agree; contradicted: [K], where.
    """

    hosts: Integers
    knots_ns: Integers
    reach_ns: float
    offsets_ns: Floats
    errors_ns: Floats
    drift: float
    contradiction_ns: float
    contradicted: Bools

    def align(self, trace: int, times_ns: Integers) -> Integers:
        """Times of the trace at place `trace` as the first rank's clock would have shown them."""
        host = self.hosts[trace]
        # A knot, as this rank's clock showed it.
        seen = self.knots_ns - self.offsets_ns[:, host]
        return np.round(times_ns + np.interp(times_ns, seen, self.offsets_ns[:, host])).astype(np.int64)

    def errors_at(self, aligned_ns: Integers, one: int, other: int) -> Floats:
        """How far the difference between two traces' aligned times may be off, at times of the first clock."""
        a, b = self.hosts[one], self.hosts[other]
        errors: Floats = self._errors_between[np.searchsorted(self.knots_ns, aligned_ns), a, b]
        return errors

    @cached_property
    def _errors_between(self) -> Floats:
        """[K + 1, H, H]: of the worse of the knots around, and what drifts away from a line between them: at most
        2 d1 d2 / (d1 + d2) times the drift, d1 and d2 away from the two, which is half of their distance; as far reach
        the first knot and the last."""
        first, last = self.errors_ns[:1], self.errors_ns[-1:]
        worst = np.maximum(np.concatenate([first, self.errors_ns]), np.concatenate([self.errors_ns, last]))
        two = 1 - np.eye(worst.shape[1])  # one clock does not drift from itself
        between: Floats = worst + self.drift * self.reach_ns * two
        return between

    def offsets(self, run: Run) -> list[ClockOffset]:
        """One a rank: at the middle of the run, and, where it moves, at every knot."""
        found = []
        for trace, host in zip(run.traces, self.hosts, strict=True):
            middle = self.offsets_ns[len(self.knots_ns) // 2, host]
            errors = self._errors_between[:, 0, host]
            knots: tuple[tuple[int, int], ...] = ()
            if np.ptp(self.offsets_ns[:, host]) >= 1:
                offsets = np.round(self.offsets_ns[:, host]).astype(np.int64)
                knots = tuple(
                    (int(at - offset), int(offset)) for at, offset in zip(self.knots_ns, offsets, strict=True)
                )
            bound = math.ceil(errors.max()) if np.isfinite(errors).all() else None
            found.append(ClockOffset(trace.metadata.rank, round(middle), bound, knots))
        return found


def synchronise_clocks(run: Run, columns: list[Columns], groups: list[Matched]) -> ClockSync:
    """Cost: P a matched operation; H^3 a knot for H hosts, at most a few hundred million in all."""
    names = list(dict.fromkeys(trace.metadata.host for trace in run.traces))
    hosts = np.array([names.index(trace.metadata.host) for trace in run.traces], np.int64)
    met = [synchronising_operations(run, columns, matched) for matched in groups]
    rough = _rough_offsets(run, hosts, len(names), met)
    begin, end = _span(run, hosts, rough)
    count = min(max(1, math.ceil((end - begin) / _SPACING_NS)), max(1, _MOST_BOUNDS // len(names) ** 2))
    if len(names) == 1:
        count = 1
    edges = np.linspace(begin, end, count + 1)
    knots = np.round((edges[:-1] + edges[1:]) / 2).astype(np.int64)
    reach = float(edges[1] - edges[0]) / 2
    seen = _bounds(run, hosts, rough, met, edges, len(names))
    for drift in _DRIFTS:
        bounds = _carried(seen, knots, reach, drift)
        pairs = bounds + np.swapaxes(bounds, 1, 2)
        _close(bounds)
        contradicted: Bools = np.any(np.diagonal(bounds, axis1=1, axis2=2) < 0, axis=1)
        if not contradicted.any():
            break
    # Said of two clocks, where two suffice: a way round many goes through a circle more than once.
    worst = min(0.0, float(pairs.min())) or min(0.0, float(np.diagonal(bounds, axis1=1, axis2=2).min()))
    bounds[contradicted] = _NEVER
    # From here on of one clock against another: the first's to all, and all to the first's.
    there, back = bounds[:, 0, :], bounds[:, :, 0]
    known = np.isfinite(there) & np.isfinite(back)
    # Offsets that stand still, where they can; else those of each knot.
    still = bounds.min(axis=0, keepdims=True)
    _close(still)
    if contradicted.any() or (np.diagonal(still[0]) < 0).any():
        middles = _middles(there, back, known)
        _fill(middles, known)
    else:
        middles = np.repeat(_middles(still[:, 0, :], still[:, :, 0], known[:1]), len(knots), axis=0)
    apart = middles[:, None, :] - middles[:, :, None]
    errors = np.maximum(bounds - apart, np.swapaxes(bounds, 1, 2) + apart)
    # Bounds are on what is left after the rough offsets.
    return ClockSync(hosts, knots, reach, middles + rough, errors, drift, -worst or 0.0, contradicted)


def _rough_offsets(run: Run, hosts: Integers, count: int, met: list[Matched]) -> Floats:
    """[H], good to the time that operations take: clocks of different hosts begin when these were started, days apart.

    A host that met none lies so that its first record is at the first rank's: somewhere, and its bound says so.
    """
    rough = np.full(count, np.nan)
    rough[0] = 0
    differences: dict[tuple[int, int], float] = {}
    for matched in met:
        if len(matched.places):
            finished = matched.field(run, "finished_ns")
            one = hosts[matched.members[0]]
            for at, member in enumerate(matched.members):
                apart = float(np.median(finished[:, 0] - finished[:, at]))
                differences[one, hosts[member]] = apart
                differences[hosts[member], one] = -apart
    for _ in range(count):
        for (one, other), apart in differences.items():
            if np.isnan(rough[other]) and not np.isnan(rough[one]):
                rough[other] = rough[one] + apart
    first = [_first_ns(run, hosts, host) for host in range(count)]
    for host in np.flatnonzero(np.isnan(rough)):
        rough[host] = first[0] - first[host]
    return np.round(rough)


def _first_ns(run: Run, hosts: Integers, host: int) -> int:
    begins = [_times(run, index) for index in np.flatnonzero(hosts == host).tolist()]
    return min((int(times.min()) for times in begins if len(times)), default=0)


def _times(run: Run, index: int) -> Integers:
    trace = run.traces[index]
    lists = (trace.operations["queued_ns"], trace.operations["finished_ns"], trace.steps["began_ns"])
    return np.concatenate([*lists, trace.steps["ended_ns"], trace.progress["at_ns"]])


def _span(run: Run, hosts: Integers, rough: Floats) -> tuple[float, float]:
    all_times = [_times(run, index) + rough[host] for index, host in enumerate(hosts)]
    ends = [(float(times.min()), float(times.max())) for times in all_times if len(times)]
    if not ends:
        return 0.0, 1.0
    return min(begin for begin, _ in ends), max(end for _, end in ends) + 1


def _bounds(
    run: Run,
    hosts: Integers,
    rough: Floats,
    met: list[Matched],
    edges: Floats,
    count: int,
) -> Floats:
    """[K, H, H]: of the operations between two edges, the least finished_i - started_j, i of the one host, j of the
    other, after the rough offsets."""
    bounds = np.full((len(edges) - 1, count, count), _NEVER)
    for matched in met:
        if not len(matched.places):
            continue
        mine = hosts[list(matched.members)]
        shift = rough[mine]
        finished = matched.field(run, "finished_ns") + shift
        started = matched.field(run, "started_ns") + shift
        # By the first clock, where a member goes by it; else by one that is off by what has drifted since the middle.
        at = next((at for at, host in enumerate(mine) if host == 0), 0)
        knot = np.clip(np.searchsorted(edges, finished[:, at], side="right") - 1, 0, len(edges) - 2)
        order = np.argsort(knot, kind="stable")
        used, firsts = np.unique(knot[order], return_index=True)
        there = list(dict.fromkeys(mine.tolist()))
        soonest = {host: finished[:, mine == host].min(axis=1)[order] for host in there}
        latest = {host: started[:, mine == host].max(axis=1)[order] for host in there}
        for one in there:
            for other in there:
                least = np.minimum.reduceat(soonest[one] - latest[other], firsts)
                bounds[used, one, other] = np.minimum(bounds[used, one, other], least)
    return bounds


def _carried(seen: Floats, knots: Integers, reach_ns: float, drift: float) -> Floats:
    """At each knot the tightest of all knots' bounds, let out by the drift in between, and inside one."""
    diagonal = np.arange(seen.shape[1])
    bounds = seen + drift * reach_ns
    bounds[:, diagonal, diagonal] = seen[:, diagonal, diagonal]
    steps = drift * np.diff(knots)
    for at in range(1, len(knots)):
        np.minimum(bounds[at], bounds[at - 1] + steps[at - 1], out=bounds[at])
    for at in range(len(knots) - 2, -1, -1):
        np.minimum(bounds[at], bounds[at + 1] + steps[at], out=bounds[at])
    bounds[:, diagonal, diagonal] = np.minimum(bounds[:, diagonal, diagonal], 0)
    return bounds


def _close(bounds: Floats) -> None:
    """Shortest paths between all, in place (Floyd & Warshall); a circle below 0 shows on the diagonal.

    Through such a circle paths would double with every host; they are of no use then, and kept finite.
    """
    for via in range(bounds.shape[1]):
        np.minimum(bounds, bounds[:, :, via, None] + bounds[:, None, via, :], out=bounds)
        np.maximum(bounds, -_FAR_NS, out=bounds)


def _middles(
    there: Floats,
    back: Floats,
    known: Bools,
) -> Floats:
    differences: Floats = np.subtract(there, back, where=known, out=np.zeros_like(there))
    return differences / 2


def _fill(middles: Floats, known: Bools) -> None:
    """Where a knot has no answer, a line between those that have; its error stays infinite."""
    at = np.arange(len(middles))
    for host in range(middles.shape[1]):
        if known[:, host].any():
            middles[:, host] = np.interp(at, at[known[:, host]], middles[known[:, host], host])
