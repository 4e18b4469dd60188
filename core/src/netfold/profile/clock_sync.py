"""Find the offset of each rank's clock to the first rank's clock, from the operations themselves.

No rank finishes a synchronising operation (`matching.synchronising_operations`) before all ranks have begun. So for any
ranks i and j, with offsets o:

    finished_i + o_i >= started_j + o_j,   that is   o_j - o_i <= finished_i - started_j

Each operation bounds each pair in both directions. These bounds are a system of difference constraints. The tightest
bounds that follow from the system are shortest paths. The middle of the remaining range of each rank against the first
rank satisfies all bounds together (add d(first, j) <= d(first, i) + d(i, j) to d(i, first) <= d(i, j) + d(j, first)).
Ranks of one host share CLOCK_MONOTONIC: they are one clock here, without error. The middle is no more likely than the
rest of the range; its error is the bound.

Clocks drift. So offsets are computed at *knots*, a fraction of a second apart, each from the whole run: a bound that
was seen t seconds from a knot counts there with t * drift added. This is correct if no two clocks drift apart faster,
and an offset may follow any curve (Duda et al., ICDCS 1987, fit one line to such bounds). 100 ppm is the drift of two
free quartzes. If the bounds contradict one another at 100 ppm, the drift is 1000 ppm, the most that adjtimex allows
between two clocks. If they still contradict one another, a clock was stepped (by a moved virtual machine, say), or two
machines have one name. Such knots have no offset, and operations near them are not compared.
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
# Bound of knots times pairs of hosts, for memory (8 bytes each). Jobs of many hosts have fewer knots.
_MOST_BOUNDS = 1 << 22
_NEVER = math.inf
_FAR_NS = 1e18


@dataclass(frozen=True)
class ClockSync:
    """The offsets of H clocks at K knots. Clock 0 is the first rank's."""

    hosts: Integers  # [ranks], the clock of each trace
    knots_ns: Integers  # [K] on the first clock, ascending, each in the middle of its part of the run
    reach_ns: float  # from a knot to both ends of its part
    offsets_ns: Floats  # [K, H], to be added
    errors_ns: Floats  # [K, H, H], the error of the difference of two offsets; infinite: unbounded
    drift: float  # growth of a bound, in seconds per second
    contradiction_ns: float  # the largest contradiction of bounds, 0 if they agree
    contradicted: Bools  # [K], whether the bounds contradict one another there

    def align(self, trace: int, times_ns: Integers) -> Integers:
        """Convert times of trace number `trace` to the first rank's clock."""
        host = self.hosts[trace]
        # The knots on this rank's clock.
        knots = self.knots_ns - self.offsets_ns[:, host]
        return np.round(times_ns + np.interp(times_ns, knots, self.offsets_ns[:, host])).astype(np.int64)

    def errors_at(self, aligned_ns: Integers, one: int, other: int) -> Floats:
        """The error of the difference between two traces' aligned times, at times of the first clock."""
        a, b = self.hosts[one], self.hosts[other]
        errors: Floats = self._errors_between[np.searchsorted(self.knots_ns, aligned_ns), a, b]
        return errors

    @cached_property
    def _errors_between(self) -> Floats:
        """[K + 1, H, H]: the larger error of the two knots around, plus the drift away from a line between them.

        This drift is at most 2 d1 d2 / (d1 + d2) times the drift rate, at the distances d1 and d2 from the knots: at
        most half of the knots' distance, which is also the reach of the first and the last knot.
        """
        first, last = self.errors_ns[:1], self.errors_ns[-1:]
        worst = np.maximum(np.concatenate([first, self.errors_ns]), np.concatenate([self.errors_ns, last]))
        two = 1 - np.eye(worst.shape[1])  # one clock does not drift from itself
        between: Floats = worst + self.drift * self.reach_ns * two
        return between

    def offsets(self, run: Run) -> list[ClockOffset]:
        """The offset of each rank in the middle of the run, and at every knot if the offset moves."""
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
    """Compute the offsets.

    Cost: P for each matched operation; H^3 for each knot with H hosts, at most a few hundred million in all.
    """
    names = list(dict.fromkeys(trace.metadata.host for trace in run.traces))
    hosts = np.array([names.index(trace.metadata.host) for trace in run.traces], np.int64)
    synchronising = [synchronising_operations(run, columns, matched) for matched in groups]
    rough = _rough_offsets(run, hosts, len(names), synchronising)
    begin, end = _span(run, hosts, rough)
    count = min(max(1, math.ceil((end - begin) / _SPACING_NS)), max(1, _MOST_BOUNDS // len(names) ** 2))
    if len(names) == 1:
        count = 1
    edges = np.linspace(begin, end, count + 1)
    knots = np.round((edges[:-1] + edges[1:]) / 2).astype(np.int64)
    reach = float(edges[1] - edges[0]) / 2
    seen = _bounds(run, hosts, rough, synchronising, edges, len(names))
    for drift in _DRIFTS:
        bounds = _carried(seen, knots, reach, drift)
        pairs = bounds + np.swapaxes(bounds, 1, 2)
        _close(bounds)
        contradicted: Bools = np.any(np.diagonal(bounds, axis1=1, axis2=2) < 0, axis=1)
        if not contradicted.any():
            break
    # Report the contradiction of two clocks if there is one: a path over many clocks may repeat a negative cycle.
    worst = min(0.0, float(pairs.min())) or min(0.0, float(np.diagonal(bounds, axis1=1, axis2=2).min()))
    bounds[contradicted] = _NEVER
    # From the first clock to all clocks, and from all clocks to the first.
    there, back = bounds[:, 0, :], bounds[:, :, 0]
    known = np.isfinite(there) & np.isfinite(back)
    # One constant offset for each clock if the bounds allow it; otherwise one offset for each knot.
    constant = bounds.min(axis=0, keepdims=True)
    _close(constant)
    if contradicted.any() or (np.diagonal(constant[0]) < 0).any():
        middles = _middles(there, back, known)
        _fill(middles, known)
    else:
        middles = np.repeat(_middles(constant[:, 0, :], constant[:, :, 0], known[:1]), len(knots), axis=0)
    apart = middles[:, None, :] - middles[:, :, None]
    errors = np.maximum(bounds - apart, np.swapaxes(bounds, 1, 2) + apart)
    # Bounds are relative to the rough offsets.
    return ClockSync(hosts, knots, reach, middles + rough, errors, drift, -worst or 0.0, contradicted)


def _rough_offsets(run: Run, hosts: Integers, count: int, synchronising: list[Matched]) -> Floats:
    """[H], exact to the duration of operations. Before it, clocks of different hosts may be days apart.

    A host without common operations is placed with its first record at the first rank's first record; its error is
    unbounded.
    """
    rough = np.full(count, np.nan)
    rough[0] = 0
    differences: dict[tuple[int, int], float] = {}
    for matched in synchronising:
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
    run: Run, hosts: Integers, rough: Floats, synchronising: list[Matched], edges: Floats, count: int
) -> Floats:
    """[K, H, H]: the least finished_i - started_j of the operations between two edges, i and j on two hosts, after the
    rough offsets."""
    bounds = np.full((len(edges) - 1, count, count), _NEVER)
    for matched in synchronising:
        if not len(matched.places):
            continue
        clocks = hosts[list(matched.members)]
        shift = rough[clocks]
        finished = matched.field(run, "finished_ns") + shift
        started = matched.field(run, "started_ns") + shift
        # On the first clock if a member has it; otherwise on a clock that is wrong by its drift since the middle.
        at = next((at for at, host in enumerate(clocks) if host == 0), 0)
        knot = np.clip(np.searchsorted(edges, finished[:, at], side="right") - 1, 0, len(edges) - 2)
        order = np.argsort(knot, kind="stable")
        used, firsts = np.unique(knot[order], return_index=True)
        used_hosts = list(dict.fromkeys(clocks.tolist()))
        soonest = {host: finished[:, clocks == host].min(axis=1)[order] for host in used_hosts}
        latest = {host: started[:, clocks == host].max(axis=1)[order] for host in used_hosts}
        for one in used_hosts:
            for other in used_hosts:
                least = np.minimum.reduceat(soonest[one] - latest[other], firsts)
                bounds[used, one, other] = np.minimum(bounds[used, one, other], least)
    return bounds


def _carried(seen: Floats, knots: Integers, reach_ns: float, drift: float) -> Floats:
    """At each knot the tightest of all knots' bounds, each plus the drift between the knots and within its part."""
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
    """Compute the shortest paths between all clocks, in place (Floyd & Warshall).

    A negative cycle makes the diagonal negative. Paths through the cycle would double with every host; they are kept
    finite.
    """
    for via in range(bounds.shape[1]):
        np.minimum(bounds, bounds[:, :, via, None] + bounds[:, None, via, :], out=bounds)
        np.maximum(bounds, -_FAR_NS, out=bounds)


def _middles(there: Floats, back: Floats, known: Bools) -> Floats:
    differences: Floats = np.subtract(there, back, where=known, out=np.zeros_like(there))
    return differences / 2


def _fill(middles: Floats, known: Bools) -> None:
    """Interpolate at knots without an offset. Their errors stay infinite."""
    at = np.arange(len(middles))
    for host in range(middles.shape[1]):
        if known[:, host].any():
            middles[:, host] = np.interp(at, at[known[:, host]], middles[known[:, host], host])
