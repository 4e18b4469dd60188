"""The choice table: immutable rows, the same on every rank of a group."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from netfold import units
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
# The sizes of these differ between ranks (Call::choice_bytes). So they have one row for all sizes, chosen by the cost
# at this size.
UNSIZED = ("gather", "scatter", "barrier")
_TYPICAL_BYTES = 64 << 10

# Sizes at which the choice may change.
_GRID = (0, *(1 << power for power in range(6, 34)))
# An algorithm gets a row only if its time is below this part of the current row's: the model is no more accurate.
_WORTH_A_ROW = 0.98


@dataclass(frozen=True)
class Row:
    """From `min_bytes` on, `operation` runs by `algorithm` with wire dtype `wire`."""

    operation: str
    min_bytes: int
    algorithm: str
    wire: str  # auto: the tensor's dtype
    reason: str
    between: str = "local"  # of a hierarchical algorithm: the algorithm between hosts; else local


@dataclass(frozen=True)
class ChoiceTable:
    rows: tuple[Row, ...]

    def choose(self, operation: str, size_bytes: int) -> Row:
        """The row for an operation of this size (as defined in `netfold.tuning.cost`); KeyError if unknown."""
        fitting = [row for row in self.rows if row.operation == operation and row.min_bytes <= size_bytes]
        if not fitting:
            raise KeyError(f"no operation {operation!r}; there are {', '.join(OPERATIONS)}")
        return max(fitting, key=lambda row: row.min_bytes)

    def workers(self, topology: Topology) -> tuple[int, ...]:
        """The ranks that join the switch, in the switch's order of reduction: all, one a host, or none."""
        if any(row.algorithm in BY_SWITCH for row in self.rows):
            return tuple(range(topology.ranks))
        if any(row.between in BY_SWITCH for row in self.rows):
            return topology.leaders
        return ()

    @property
    def splits(self) -> bool:
        """Whether any row depends on the measured capacity of switches."""
        return any("split" in (row.algorithm, row.between) for row in self.rows)

    @property
    def hash16(self) -> int:
        """The hash in every packet and message. It covers the reasons: other reasons mean other inputs."""
        return int.from_bytes(hashlib.sha256(self.to_json().encode()).digest()[:2], "big")

    def to_json(self) -> str:
        return json.dumps([asdict(row) for row in self.rows], sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ChoiceTable:
        return cls(tuple(Row(**row) for row in json.loads(text)))


@dataclass(frozen=True)
class Candidate:
    """An algorithm with a formula for an operation."""

    algorithm: str
    seconds: float | None  # predicted; None: it cannot run
    note: str  # the formula's source, or why the algorithm cannot run


def candidates(
    operation: str,
    size_bytes: int,
    topology: Topology,
    links: Links = DEFAULT_LINKS,
    *,
    switch: str | None = None,
    wire: str = "auto",
) -> list[Candidate]:
    """List all algorithms with a formula for `operation`, by predicted time; those that cannot run come last."""
    result = []
    for algorithm in algorithms_of(operation):
        why_not = _why_not(operation, algorithm, topology, switch, wire)
        if why_not is None or (operation, algorithm) in BY_NAME_ONLY:
            seconds = predict(operation, algorithm, size_bytes, topology, links, wire, switch=_count(switch))
            note = why_not or FORMULAS[operation, algorithm].source
            if algorithm == "hierarchical":
                note += f": {best_between(operation, case_of(size_bytes, topology, links, wire, _count(switch)))}"
            result.append(Candidate(algorithm, seconds, note))
        else:
            result.append(Candidate(algorithm, None, why_not))
    return sorted(result, key=lambda each: (each.seconds is None, each.seconds))


def _count(switch: str | None) -> int:
    """The number of switches in NETFOLD_SWITCH."""
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
    """Make the table of a group of `ranks`.

    switch: NETFOLD_SWITCH; None without a switch.
    algorithm: NETFOLD_ALGORITHM.
    wire: NETFOLD_WIRE_DTYPE.
    topology: None: every rank on its own host.
    measuring: send each all_reduce through the switch, to measure the switch's capacity.
    Raises ValueError if a requested algorithm or wire dtype is impossible. There is no fallback.
    """
    topology = topology or Topology.apart(ranks)
    overrides = parse_overrides(algorithm, SUPPORTS, OPERATIONS)
    if wire not in WIRES:
        raise ValueError(f"NETFOLD_WIRE_DTYPE={wire!r} is not one of {', '.join(WIRES)}")
    if wire == "i8" and ranks > kernels.max_byte_contributions:
        raise ValueError(
            f"NETFOLD_WIRE_DTYPE=i8 takes at most {kernels.max_byte_contributions} ranks, not {ranks}: a byte that "
            f"holds the sum of {ranks} contributions leaves too few levels for each; bf16 and i32 take any number"
        )
    for operation in OPERATIONS:
        requested = overrides.algorithm(operation)
        if requested in BY_SWITCH and operation in SUPPORTS[requested]:
            _refuse(operation, requested, overrides, topology, switch, _wire_of(operation, wire))
    if ranks == 1:
        return ChoiceTable(tuple(Row(operation, 0, "local", "auto", "a group of one rank") for operation in OPERATIONS))
    rows = []
    for operation in OPERATIONS:
        operation_wire = _wire_of(operation, wire)
        if measuring and operation == "all_reduce" and switch is not None:
            rows.append(_through_switch(topology, switch, operation_wire, "to measure its capacity"))
        else:
            rows += _rows(operation, overrides, topology, links, switch, operation_wire)
    return ChoiceTable(tuple(rows))


def table_without_switch(workers: int, *, wire: str, links: Links = DEFAULT_LINKS) -> ChoiceTable:
    """Make the table that replaces a lost switch among the ranks that had joined it."""
    return build_table(ranks=workers, switch=None, wire=wire, links=links)


def _wire_of(operation: str, wire: str) -> str:
    """The wire dtype of an operation: only all_reduce uses the requested one. Others would lose bits."""
    return wire if operation == "all_reduce" else "auto"


def check_words(*, ranks: int, switch: str | None, algorithm: str, wire: str) -> None:
    """Raise ValueError if the request is impossible for every placement of the ranks on hosts."""
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
    wire_note = "" if wire == "auto" else f"; f32 tensors travel as {wire} (NETFOLD_WIRE_DTYPE)"
    # On several ranks per host, one rank of each host joins the switch. An override may have all ranks join instead;
    # then no hierarchical operation uses the switch.
    by_host = topology.has_levels and not any(map(overrides.names, BY_SWITCH))
    between_hosts = switch if by_host or not topology.has_levels else None
    requested = overrides.algorithm(operation)
    suffix = ""
    if requested is not None:
        setting = overrides.setting(operation)
        if operation in SUPPORTS[requested]:
            _refuse(operation, requested, overrides, topology, switch, wire)
            between = overrides.between(operation)
            if between is not None and operation in SUPPORTS[between]:
                return [_between(operation, between, overrides, topology, between_hosts, wire, wire_note)]
            if requested == "hierarchical":
                starts = _starts(operation, ["hierarchical"], topology, links, between_hosts, wire)
                return [
                    Row(operation, size, name, wire, f"{setting}: {between} between hosts{wire_note}", between)
                    for size, name, between in starts
                ]
            return [Row(operation, 0, requested, wire, setting + wire_note)]
        suffix = f"; {setting} does not do {operation}"
    if operation == "all_reduce" and switch is not None and topology.node_count == 1:
        reason = "the ranks share a host, where shared memory would be faster, but NETFOLD_SWITCH names a switch"
        return [_through_switch(topology, switch, wire, reason + wire_note)]
    if topology.node_count == 1 and _why_not(operation, "shared_memory", topology, switch, wire) is None:
        return [Row(operation, 0, "shared_memory", wire, "all ranks share memory" + suffix)]
    # With two hosts, each sends as many bytes in a ring as through a switch, so `split` gains nothing.
    excluded = BY_SWITCH if by_host else ("split",) if topology.node_count < 3 else ()
    able = [
        name
        for name in algorithms_of(operation)
        if _why_not(operation, name, topology, switch, wire) is None and name not in excluded
    ]
    return _by_cost(operation, able, topology, links, between_hosts, wire, wire_note + suffix)


def _between(
    operation: str, between: str, overrides: Overrides, topology: Topology, switch: str | None, wire: str, note: str
) -> Row:
    """The row of a hierarchical operation whose algorithm between hosts was requested."""
    _refuse(operation, between, overrides, Topology.apart(topology.node_count), switch, wire)
    return Row(operation, 0, "hierarchical", wire, f"{overrides.setting(operation)}{note}", between)


def _through_switch(topology: Topology, switch: str, wire: str, why: str) -> Row:
    reason = f"NETFOLD_SWITCH={switch}: {why}"
    if topology.has_levels:
        return Row("all_reduce", 0, "hierarchical", wire, f"in_network between hosts; {reason}", "in_network")
    return Row("all_reduce", 0, "in_network", wire, reason)


def about_switch(ranks: int, links: Links, switch: str) -> str:
    """Describe the rate of the switch, and the switch's part in a large all_reduce of `ranks`."""
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
    """Rows of the cheapest algorithm at every size of the grid. Adjacent sizes with one algorithm share a row."""
    if len(able) == 1:
        return [Row(operation, 0, able[0], wire, "the only algorithm that can run it here" + suffix)]
    starts = _starts(operation, able, topology, links, switch, wire)
    rows = []
    for index, (size, name, between) in enumerate(starts):
        # The reason shows the times at a size inside the row: four times its start, if that is inside.
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
    """List (size, algorithm, algorithm between hosts) for each size from which another choice is the cheapest."""
    starts: list[tuple[int, str, str]] = []
    for size in (0,) if operation in UNSIZED else _GRID:
        predicted = _TYPICAL_BYTES if operation in UNSIZED else size
        case = case_of(predicted, topology, links, wire, _count(switch))
        times = {name: predict(operation, name, predicted, topology, links, wire, switch=case.switch) for name in able}
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
    text = ", ".join(f"{name} {units.seconds(seconds)}" for seconds, name in times)
    return f"{text} ({links.text()})"


def _why_not(operation: str, algorithm: str, topology: Topology, switch: str | None, wire: str) -> str | None:
    """Return the reason why `auto` cannot choose `algorithm`; None if it can."""
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
        return f"cannot convert tensors to {wire}"
    return None


def _refuse(
    operation: str, requested: str, overrides: Overrides, topology: Topology, switch: str | None, wire: str
) -> None:
    """Raise ValueError if the requested algorithm cannot run the operation."""
    setting = overrides.setting(operation)
    if requested in BY_SWITCH and switch is None:
        raise ValueError(f"{setting} needs an aggregator: start `netfold switch` and set NETFOLD_SWITCH=host:port")
    if wire in HALVES and not FORMULAS[operation, requested].narrow:
        able = [name for name in algorithms_of(operation) if FORMULAS[operation, name].narrow]
        raise ValueError(f"{setting} sends tensors as they are; NETFOLD_WIRE_DTYPE={wire} needs {' or '.join(able)}")
    why_not = _why_not(operation, requested, topology, switch, wire)
    if why_not is not None and (operation, requested) not in BY_NAME_ONLY:
        raise ValueError(f"{setting} cannot be: {why_not}")
