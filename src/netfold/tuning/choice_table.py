"""The choice table: immutable rows that every rank of a group reads alike."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from netfold._native import engine, kernels
from netfold.tuning.cost import (
    BY_NAME_ONLY,
    BY_SWITCH,
    FORMULAS,
    HALVES,
    Case,
    algorithms_of,
    best_between,
    case_of,
    predict,
    split_rate,
    switch_part,
)
from netfold.tuning.overrides import Overrides, parse_overrides
from netfold.tuning.topology import DEFAULT_LINKS, Links, Topology

WIRES = ("auto", "f32", "bf16", "f16", "i32", "i8")
SUPPORTS: Mapping[str, Sequence[str]] = engine.SUPPORTS

OPERATIONS = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "reduce",
    "gather",
    "scatter",
    "barrier",
)
# Ranks know different sizes of these (Call::choice_bytes): one row, for all sizes, by what one of this size costs.
UNSIZED = ("gather", "scatter", "barrier")
_TYPICAL_BYTES = 64 << 10

# Sizes at which the choice may change.
_GRID = (0, *(1 << power for power in range(6, 34)))
# Another algorithm must be this much better before it gets a row of its own: the model is no finer.
_WORTH_A_ROW = 0.98


@dataclass(frozen=True)
class Row:
    """From `min_bytes` on, `operation` runs by `algorithm` in `wire`; `auto` is the tensor's own dtype.

    between: of a hierarchical one, the algorithm between hosts; else `local`, for none.
    """

    operation: str
    min_bytes: int
    algorithm: str
    wire: str
    reason: str
    between: str = "local"


@dataclass(frozen=True)
class ChoiceTable:
    rows: tuple[Row, ...]

    def choose(self, operation: str, size_bytes: int) -> Row:
        """The row in force; KeyError for an operation that does not exist. Sizes as in `netfold.tuning.cost`."""
        fitting = [row for row in self.rows if row.operation == operation and row.min_bytes <= size_bytes]
        if not fitting:
            raise KeyError(f"no operation {operation!r}; there are {', '.join(OPERATIONS)}")
        return max(fitting, key=lambda row: row.min_bytes)

    def workers(self, topology: Topology) -> tuple[int, ...]:
        """The ranks that join the switch, in the order in which it adds: all, or one a host, or, without one, none."""
        if any(row.algorithm in BY_SWITCH for row in self.rows):
            return tuple(range(topology.ranks))
        if any(row.between in BY_SWITCH for row in self.rows):
            return topology.leaders
        return ()

    @property
    def splits(self) -> bool:
        """Whether any row goes by what each switch can take."""
        return any("split" in (row.algorithm, row.between) for row in self.rows)

    @property
    def hash16(self) -> int:
        """What travels with every packet and message. Reasons count: ranks that differ in them differ in something."""
        return int.from_bytes(hashlib.sha256(self.to_json().encode()).digest()[:2], "big")

    def to_json(self) -> str:
        return json.dumps([asdict(row) for row in self.rows], sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ChoiceTable:
        return cls(tuple(Row(**row) for row in json.loads(text)))


@dataclass(frozen=True)
class Candidate:
    """An algorithm that could run an operation: predicted seconds, or why it cannot."""

    algorithm: str
    seconds: float | None
    note: str


def candidates(
    operation: str,
    size_bytes: int,
    topology: Topology,
    links: Links = DEFAULT_LINKS,
    *,
    switch: str | None = None,
    wire: str = "auto",
) -> list[Candidate]:
    """All algorithms with a formula for `operation`, those that can run first and by predicted time."""
    found = []
    for algorithm in algorithms_of(operation):
        why_not = _why_not(operation, algorithm, topology, switch, wire)
        if why_not is None or (operation, algorithm) in BY_NAME_ONLY:
            seconds = predict(operation, algorithm, size_bytes, topology, links, wire, switch=_count(switch))
            note = why_not or FORMULAS[operation, algorithm].source
            if algorithm == "hierarchical":
                note += f": {best_between(operation, case_of(size_bytes, topology, links, wire, _count(switch)))}"
            found.append(Candidate(algorithm, seconds, note))
        else:
            found.append(Candidate(algorithm, None, why_not))
    return sorted(found, key=lambda each: (each.seconds is None, each.seconds))


def _count(switch: str | None) -> int:
    """How many switches NETFOLD_SWITCH names."""
    return 0 if switch is None else switch.count(",") + 1


@functools.lru_cache(maxsize=64)  # a job makes many groups of the same size; a table takes milliseconds
def build_table(
    *,
    ranks: int,
    switch: str | None,
    algorithm: str = "auto",
    wire: str = "auto",
    topology: Topology | None = None,
    links: Links = DEFAULT_LINKS,
    measuring: bool = False,
) -> ChoiceTable:
    """The table of a group of `ranks`, with `switch` its aggregator's address or None.

    algorithm: what NETFOLD_ALGORITHM says. topology: every rank on a host of its own where None. measuring: for the
    operations that measure what the switch takes: each all_reduce goes through it.
    Raises ValueError, in a sentence, where what was asked for cannot be done: nothing else is done instead.
    """
    topology = topology or Topology.apart(ranks)
    overrides = parse_overrides(algorithm, SUPPORTS, OPERATIONS)
    if wire not in WIRES:
        raise ValueError(f"NETFOLD_WIRE_DTYPE={wire!r} is not one of {', '.join(WIRES)}")
    if wire == "i8" and ranks > kernels.max_byte_contributions:
        raise ValueError(
            f"NETFOLD_WIRE_DTYPE=i8 adds for at most {kernels.max_byte_contributions} ranks, not {ranks}: a byte that "
            f"must "
            f"hold the sum of {ranks} has too few levels left for each; bf16 and i32 take any number"
        )
    for operation in OPERATIONS:
        asked = overrides.asked(operation)
        if asked in BY_SWITCH and operation in SUPPORTS[asked]:
            _refuse(operation, asked, overrides, topology, switch, _wired(operation, wire))
    if ranks == 1:
        return ChoiceTable(tuple(Row(operation, 0, "local", "auto", "a group of one rank") for operation in OPERATIONS))
    rows = []
    for operation in OPERATIONS:
        in_wire = _wired(operation, wire)
        if measuring and operation == "all_reduce" and switch is not None:
            rows.append(_through_switch(topology, switch, in_wire, "to measure what it takes"))
        else:
            rows += _rows(operation, overrides, topology, links, switch, in_wire)
    return ChoiceTable(tuple(rows))


def table_without_switch(workers: int, *, wire: str, links: Links = DEFAULT_LINKS) -> ChoiceTable:
    """What does a switch's work while it is gone, among the ranks that had joined it: by cost, over connections."""
    return build_table(ranks=workers, switch=None, wire=wire, links=links)


def _wired(operation: str, wire: str) -> str:
    """A narrower wire loses bits in an all_reduce's sum, which was asked for; everything else travels as it is."""
    return wire if operation == "all_reduce" else "auto"


def check_words(*, ranks: int, switch: str | None, algorithm: str, wire: str) -> None:
    """ValueError, in a sentence, where no placement of the ranks on hosts could make what was asked for possible."""
    first: ValueError | None = None
    for hosts in {ranks, min(ranks, 2), 1}:
        try:
            build_table(
                ranks=ranks, switch=switch, algorithm=algorithm, wire=wire, topology=Topology.even(ranks, hosts)
            )
            return
        except ValueError as error:
            first = first or error
    assert first is not None
    raise first


def _rows(
    operation: str, overrides: Overrides, topology: Topology, links: Links, switch: str | None, wire: str
) -> list[Row]:
    in_wire = "" if wire == "auto" else f"; f32 tensors travel as {wire} (NETFOLD_WIRE_DTYPE)"
    # One rank of each host joins the switch, unless all were told to; then none goes through it for its host.
    by_host = topology.has_levels and not any(map(overrides.asks, BY_SWITCH))
    between_hosts = switch if by_host or not topology.has_levels else None
    asked = overrides.asked(operation)
    suffix = ""
    if asked is not None:
        if operation in SUPPORTS[asked]:
            _refuse(operation, asked, overrides, topology, switch, wire)
            between = overrides.between(operation)
            if between is not None and operation in SUPPORTS[between]:
                return [_between(operation, between, overrides, topology, between_hosts, wire, in_wire)]
            if asked == "hierarchical":
                return [
                    Row(
                        operation,
                        size,
                        name,
                        wire,
                        f"{overrides.named(operation)}: {between} between hosts{in_wire}",
                        between,
                    )
                    for size, name, between in _starts(
                        operation, ["hierarchical"], topology, links, between_hosts, wire
                    )
                ]
            return [Row(operation, 0, asked, wire, overrides.named(operation) + in_wire)]
        suffix = f"; {overrides.named(operation)} does not do {operation}"
    if operation == "all_reduce" and switch is not None and topology.node_count == 1:
        reason = "the ranks share a host, where memory would be quicker: who names a switch there tries it"
        return [_through_switch(topology, switch, wire, reason + in_wire)]
    if topology.node_count == 1 and _why_not(operation, "shared_memory", topology, switch, wire) is None:
        return [Row(operation, 0, "shared_memory", wire, "all ranks share memory" + suffix)]
    # One of two hosts sends as much round a ring as through a switch: there is nothing to split.
    out = BY_SWITCH if by_host else ("split",) if topology.node_count < 3 else ()
    able = [
        name
        for name in algorithms_of(operation)
        if _why_not(operation, name, topology, switch, wire) is None and name not in out
    ]
    return _by_cost(operation, able, topology, links, between_hosts, wire, in_wire + suffix)


def _between(
    operation: str, between: str, overrides: Overrides, topology: Topology, switch: str | None, wire: str, in_wire: str
) -> Row:
    """A hierarchical operation with what was named between hosts."""
    _refuse(operation, between, overrides, Topology.apart(topology.node_count), switch, wire)
    return Row(operation, 0, "hierarchical", wire, f"{overrides.named(operation)}{in_wire}", between)


def _through_switch(topology: Topology, switch: str, wire: str, why: str) -> Row:
    reason = f"NETFOLD_SWITCH={switch}: {why}"
    if topology.has_levels:
        return Row("all_reduce", 0, "hierarchical", wire, f"in_network between hosts; {reason}", "in_network")
    return Row("all_reduce", 0, "in_network", wire, reason)


def about_switch(ranks: int, links: Links, switch: str) -> str:
    """What is known of the switch's part in a large all_reduce of `ranks`, in words."""
    case = Case(0, Topology.apart(ranks), links, _count(switch))
    network = links.network.bytes_per_s
    known = "measured" if links.switches else "assumed, a link as a rank's for each"
    of_link = case.through_switch * ranks / network
    return (
        f"NETFOLD_SWITCH={switch} gives {case.through_switch / 1e6:.3g} MB/s ({known}: c = {of_link:.2g} of a rank's "
        f"link for {ranks}); with a ring beside it {split_rate(case) / 1e6:.3g} MB/s, {switch_part(case):.0%} through "
        "the switch"
    )


def _by_cost(
    operation: str, able: list[str], topology: Topology, links: Links, switch: str | None, wire: str, suffix: str
) -> list[Row]:
    """The cheapest at every size of the grid, neighbours merged."""
    if len(able) == 1:
        return [Row(operation, 0, able[0], wire, "the one algorithm there is for it here" + suffix)]
    starts = _starts(operation, able, topology, links, switch, wire)
    rows = []
    for index, (size, name, between) in enumerate(starts):
        # Times are of a size inside the row: of its start times four, where that is still inside.
        after = starts[index + 1][0] if index + 1 < len(starts) else 1 << 40
        shown = _TYPICAL_BYTES if operation in UNSIZED else min(max(4 * size, 1024), after - 1)
        sizes = f"{size} to {after - 1} bytes" if index + 1 < len(starts) else f"{size} bytes and more"
        example = f"{shown} bytes" if operation in UNSIZED else f"{shown} bytes, an example of {sizes}"
        reason = f"predicted for {example}: {_times(operation, shown, able, topology, links, switch, wire)}"
        if between != "local":
            reason = f"{between} between hosts; {reason}"
        if operation == "all_reduce" and switch is not None and {name, between} & set(BY_SWITCH):
            reason = f"{about_switch(topology.node_count, links, switch)}; {reason}"
        rows.append(Row(operation, size, name, wire, reason + suffix, between))
    return rows


def _starts(
    operation: str, able: list[str], topology: Topology, links: Links, switch: str | None, wire: str
) -> list[tuple[int, str, str]]:
    """Sizes from which on another algorithm is the cheapest, or, of a hierarchical one, another between hosts."""
    starts: list[tuple[int, str, str]] = []
    for size in (0,) if operation in UNSIZED else _GRID:
        judged = _TYPICAL_BYTES if operation in UNSIZED else size
        case = case_of(judged, topology, links, wire, _count(switch))
        times = {name: predict(operation, name, judged, topology, links, wire, switch=case.switch) for name in able}
        best = min(times, key=lambda name: times[name])
        if starts and times[best] >= _WORTH_A_ROW * times[starts[-1][1]]:
            best = starts[-1][1]
        between = best_between(operation, case) if best == "hierarchical" else "local"
        if not starts or (best, between) != starts[-1][1:]:
            starts.append((size, best, between))
    return starts


def _times(
    operation: str, size: int, able: list[str], topology: Topology, links: Links, switch: str | None, wire: str
) -> str:
    times = sorted(
        (predict(operation, name, size, topology, links, wire, switch=_count(switch)), name) for name in able
    )
    said = ", ".join(f"{name} {format_seconds(seconds)}" for seconds, name in times)
    return f"{said} ({links.text()})"


def _why_not(operation: str, algorithm: str, topology: Topology, switch: str | None, wire: str) -> str | None:
    """Why `auto` cannot take it; None where it can."""
    if operation not in SUPPORTS.get(algorithm, ()):
        return "not built in"
    if (operation, algorithm) in BY_NAME_ONLY:
        return BY_NAME_ONLY[operation, algorithm]
    if algorithm in BY_SWITCH and switch is None:
        return "no NETFOLD_SWITCH"
    if algorithm == "shared_memory" and topology.node_count > 1:
        return f"the ranks are on {topology.node_count} hosts"
    if algorithm == "hierarchical" and not topology.has_levels:
        return "needs several hosts and several ranks on one"
    if wire in HALVES and not FORMULAS[operation, algorithm].narrow:
        return f"sends tensors as they are, not as {wire}"
    return None


def _refuse(
    operation: str, asked: str, overrides: Overrides, topology: Topology, switch: str | None, wire: str
) -> None:
    if asked in BY_SWITCH and switch is None:
        raise ValueError(
            f"{overrides.named(operation)} needs an aggregator: start `netfold switch` and set NETFOLD_SWITCH=host:port"
        )
    if wire in HALVES and not FORMULAS[operation, asked].narrow:
        able = [name for name in algorithms_of(operation) if FORMULAS[operation, name].narrow]
        raise ValueError(
            f"{overrides.named(operation)} sends tensors as they are; NETFOLD_WIRE_DTYPE={wire} needs "
            f"{' or '.join(able)}"
        )
    why_not = _why_not(operation, asked, topology, switch, wire)
    if why_not is not None and (operation, asked) not in BY_NAME_ONLY:
        raise ValueError(f"{overrides.named(operation)} cannot be: {why_not}")


def format_seconds(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 1e-6:.3g} us"
