"""The link that a profile's own operations show: a cost formula solved for its latency and rate.

The rank that began last does not wait, so the shortest of the ranks' times is the time of the operation itself; this
needs no synchronised clocks. It holds where ranks began at similar times. A rank that is early sends into the sockets
of a late rank, and its part counts as sent when the kernel has the bytes. So of each size the half of the operations is
used whose ranks took the most similar times.

A formula is linear in the latency and in the time per byte. The medians by operation, algorithm and size give the two
unknowns, by least squares of the relative error. The other constants (memory, reduction) are the built-in ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from netfold.profile.columns import Bools, Columns, Floats, Names, columns_of
from netfold.profile.matching import Matched, match, synchronising_operations
from netfold.profile.run import Run
from netfold.tuning.cost import FORMULAS, predict
from netfold.tuning.topology import DEFAULT_LINKS, Link, Links, Topology

# Smaller messages depend on the load of hosts as much as on the link, which is found without them.
SMALL_BYTES = 128 << 10
# Fewer operations of one algorithm and size give no reliable median.
_LEAST_OPERATIONS = 3
# A formula with a larger error does not describe the operations: something other than the link takes their time.
_MOST_OFF = 0.25
# Where the largest size is less than 1.5 times the smallest, only a rate can be found. The latency is then assumed, and
# must not be a larger part of the time than 0.1.
_APART, _MOST_ASSUMED = 1.5, 0.1
# Other operations may overlap this part of an operation's time, at its begin and end.
_MOST_MET = 0.05
_FREE = Link(0.0, 1e30)
# Algorithms whose time is not linear in the latency and the time per byte of one link.
NO_LINE = ("shared_memory", "hierarchical", "split")


@dataclass(frozen=True)
class ObservedGroup:
    """The operations of one group, in arrays of [n].

    kind, algorithm, wire: names; wire is `auto` for dtypes without a wire format.
    size: bytes as in `netfold.tuning.cost`.
    pure_s: from the last rank's start on. apart_s: how much longer another rank took.
    alone: no other operation was under way.
    """

    kind: Names
    algorithm: Names
    wire: Names
    size: Floats
    pure_s: Floats
    apart_s: Floats
    alone: Bools
    topology: Topology

    def cells(self, these: Bools) -> list[tuple[str, str, str, float]]:
        """Kind, algorithm, wire and size of the operations `these`."""
        columns = (self.kind, self.algorithm, self.wire, self.size)
        return list(zip(*(column[these].tolist() for column in columns), strict=True))


@dataclass(frozen=True)
class Fitted:
    """links: for the cost model. operations: how many the fit used.

    off: the largest relative error of a median; None where there are no more medians than unknowns.
    latency_assumed: there was only one size, or similar sizes.
    """

    links: Links
    operations: int
    off: float | None
    latency_assumed: bool

    def text(self) -> str:
        link = self.links.network
        latency = f"{link.latency_s * 1e6:.3g} us" if link.latency_s > 0 else "no visible latency"
        latency += " (assumed)" if self.latency_assumed else ""
        checked = "too few sizes to check" if self.off is None else f"at most {100 * self.off:.0f}% off"
        rate = f"{link.bytes_per_s / 1e6:.4g} MB/s"
        return f"with the link that {self.operations} operations show: {latency}, {rate}, {checked}"


def observe_groups(run: Run) -> list[ObservedGroup]:
    """Groups of at least two ranks whose ranks all left records; the group with the most time first."""
    columns = columns_of(run)
    found = [
        _observed(run, columns, synchronising_operations(run, columns, matched))
        for matched in match(run, columns).groups
    ]
    return sorted((each for each in found if len(each.size)), key=lambda each: -float(each.pure_s.sum()))


def fit(observed: ObservedGroup, above_bytes: int = 0) -> Fitted | str:
    """The link by operations above a size, or the reason why there is none, as a clause."""
    cells: dict[tuple[str, str, str, float], Floats] = {}
    usable = observed.alone & (observed.size > above_bytes) & (observed.pure_s > 0)
    if not (observed.size > above_bytes).any():
        return f"no operation has more than {above_bytes} bytes"
    if not usable.any():
        return "no operation ran alone"
    places: dict[tuple[str, str, str, float], list[int]] = {}
    for place, cell in zip(np.flatnonzero(usable).tolist(), observed.cells(usable), strict=True):
        places.setdefault(cell, []).append(place)
    for cell, these in sorted(places.items()):
        if cell[:2] in FORMULAS and cell[1] not in NO_LINE and len(these) >= _LEAST_OPERATIONS:
            near = observed.apart_s[these] <= np.median(observed.apart_s[these])
            cells[cell] = observed.pure_s[these][near]
    if not cells:
        taken = sorted({str(name) for name in observed.algorithm})
        if taken == ["?"]:
            return "the backend does not say which algorithm ran"
        return (
            f"no {_LEAST_OPERATIONS} operations of one size used an algorithm whose time depends on one link "
            f"({', '.join(taken)})"
        )
    medians = np.array([float(np.median(times)) for times in cells.values()])
    parts = np.array([_line(observed.topology, *cell) for cell in cells])
    relative = parts / medians[:, None]
    sizes = [cell[3] for cell in cells]
    assumed = max(sizes) < _APART * min(sizes)
    if assumed:
        latency = DEFAULT_LINKS.network.latency_s
        if (relative[:, 1] * latency).max() > _MOST_ASSUMED:
            return "all operations have about one size, which is too small to separate the link's rate from its latency"
        per_byte = _least_squares(relative[:, 2:], 1 - relative[:, 0] - relative[:, 1] * latency)[0]
    else:
        latency, per_byte = _least_squares(relative[:, 1:], 1 - relative[:, 0])
        if latency < 0:
            latency, per_byte = 0.0, _least_squares(relative[:, 2:], 1 - relative[:, 0])[0]
    if per_byte <= 0:
        return "larger operations take no longer than small ones, so they do not show the link's rate"
    off = float(np.abs(relative @ np.array([1, latency, per_byte]) - 1).max())
    if off > _MOST_OFF:
        names = ", ".join(sorted({cell[1] for cell in cells}))
        return f"times are {100 * off:.0f}% off the formulas ({names}): something other than the link takes the time"
    links = replace(DEFAULT_LINKS, network=Link(float(latency), 1 / float(per_byte)), measured=True)
    checked = len(cells) > (2 if latency > 0 and not assumed else 1)
    return Fitted(links, sum(map(len, cells.values())), off if checked else None, assumed)


def _line(topology: Topology, kind: str, algorithm: str, wire: str, size: float) -> tuple[float, float, float]:
    """The terms of a formula: seconds without a link, the factor of the latency, and the bytes."""

    def seconds(network: Link) -> float:
        # Operations do not show a switch's own link: assume one port per host.
        links = replace(DEFAULT_LINKS, network=network, switches=(network.bytes_per_s,))
        return predict(kind, algorithm, size, topology, links, wire)

    fixed = seconds(_FREE)
    return fixed, seconds(replace(_FREE, latency_s=1.0)) - fixed, seconds(replace(_FREE, bytes_per_s=1.0)) - fixed


def _least_squares(rows: Floats, wanted: Floats) -> Floats:
    # Scale the columns: bytes are some millions of times larger than latencies, and rounding would lose the latencies.
    scale = np.abs(rows).max(axis=0)
    solution, *_ = np.linalg.lstsq(rows / scale, wanted, rcond=None)
    scaled: Floats = solution / scale
    return scaled


def _observed(run: Run, columns: list[Columns], matched: Matched) -> ObservedGroup:
    trace = matched.members[0]
    places = matched.places[:, 0]
    first = columns[trace]
    took = matched.field(run, "finished_ns") - matched.field(run, "started_ns")
    alone = np.all(
        [_alone(run, member)[matched.places[:, at]] for at, member in enumerate(matched.members)], axis=0
    ).reshape(len(places))
    about = run.traces[trace].metadata
    dtypes = [about.name_of("dtype", number) for number in run.traces[trace].operations["dtype"][places]]
    wires = [
        wire if dtype == "f32" and wire != "?" else "auto"
        for wire, dtype in zip(first.wire[places].tolist(), dtypes, strict=True)
    ]
    algorithm = first.algorithm[places]
    return ObservedGroup(
        kind=first.operation[places],
        algorithm=algorithm,
        wire=np.array(wires, np.str_),
        size=first.bytes[places],
        pure_s=took.min(axis=1) / 1e9,
        apart_s=(took.max(axis=1) - took.min(axis=1)) / 1e9,
        alone=alone,
        topology=_topology(run, matched, set(algorithm.tolist())),
    )


def _alone(run: Run, trace: int) -> Bools:
    """[n] whether each record of a trace overlaps other operations by no more than a fit tolerates."""
    records = run.traces[trace].operations
    order = np.argsort(records["started_ns"], kind="stable")
    started, finished = records["started_ns"][order], records["finished_ns"][order]
    until = np.concatenate([started[:1], np.maximum.accumulate(finished)[:-1]])
    after = np.concatenate([started[1:], finished[-1:]])
    alone = np.empty(len(order), np.bool_)
    met = np.maximum(until - started, 0) + np.maximum(finished - after, 0)
    alone[order] = met <= _MOST_MET * (finished - started)
    return alone


def _topology(run: Run, matched: Matched, algorithms: set[str]) -> Topology:
    """Ranks on one host share its memory, unless all ranks are on one host and use the network all the same."""
    hosts = [run.traces[member].metadata.host for member in matched.members]
    if len(set(hosts)) == 1 and not algorithms & {"shared_memory", "hierarchical"}:
        return Topology.apart(len(hosts))
    names = list(dict.fromkeys(hosts))
    return Topology(tuple(names.index(host) for host in hosts))
