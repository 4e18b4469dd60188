"""The choice table: immutable rows, the same on every rank of a group."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
_I32_RANKS = 1 << kernels.max_headroom_bits
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

    @functools.cached_property
    def hash16(self) -> int:
        """The hash in every packet and message. It covers the reasons: other reasons mean other inputs."""
        return int.from_bytes(hashlib.sha256(self.to_json().encode()).digest()[:2], "big")

    def to_json(self) -> str:
        return json.dumps([vars(row) for row in self.rows], sort_keys=True)

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
    choice = _Choice(operation, topology, links, switch, wire)
    result = []
    for algorithm in algorithms_of(operation):
        why_not = choice.why_not(algorithm)
        if why_not is None or (operation, algorithm) in BY_NAME_ONLY:
            note = why_not or FORMULAS[operation, algorithm].source
            if algorithm == "hierarchical":
                note += f": {best_between(operation, choice.case(size_bytes))}"
            result.append(Candidate(algorithm, choice.seconds(algorithm, size_bytes), note))
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
    example_bytes: int | None = None,
) -> ChoiceTable:
    """Make the table of a group of `ranks`.

    switch: NETFOLD_SWITCH; None without a switch.
    algorithm: NETFOLD_ALGORITHM.
    wire: NETFOLD_WIRE_DTYPE.
    topology: None: every rank on its own host.
    measuring: send each all_reduce through the switch, to measure the switch's capacity.
    example_bytes: the size for which the reason of its row shows times.
    Raises ValueError if a requested algorithm or wire dtype is impossible. There is no fallback.
    """
    topology = topology or Topology.apart(ranks)
    overrides = parse_overrides(algorithm, SUPPORTS, OPERATIONS)
    if wire not in WIRES:
        raise ValueError(f"NETFOLD_WIRE_DTYPE={wire!r} is not one of {', '.join(WIRES)}")
    if wire == "i8" and ranks > kernels.max_byte_contributions:
        raise ValueError(
            f"NETFOLD_WIRE_DTYPE=i8 takes at most {kernels.max_byte_contributions} ranks, not {ranks}: a byte that "
            f"holds the sum of {ranks} contributions leaves too few levels for each; i32 takes "
            f"{_I32_RANKS}, and bf16 any number"
        )
    if wire == "i32" and ranks > _I32_RANKS:
        raise ValueError(
            f"NETFOLD_WIRE_DTYPE=i32 takes at most {_I32_RANKS} ranks, not {ranks}: an integer that holds the sum of "
            f"{ranks} contributions leaves too few bits for each; bf16 and f32 take any number"
        )
    # Only all_reduce uses the requested wire dtype. Other operations would lose bits.
    choices = [
        _Choice(operation, topology, links, switch, wire if operation == "all_reduce" else "auto", example_bytes)
        for operation in OPERATIONS
    ]
    for choice in choices:
        requested = overrides.algorithm(choice.operation)
        if requested in BY_SWITCH and choice.operation in SUPPORTS[requested]:
            choice.refuse(requested, overrides.setting(choice.operation))
    if ranks == 1:
        return ChoiceTable(tuple(Row(operation, 0, "local", "auto", "a group of one rank") for operation in OPERATIONS))
    rows = []
    for choice in choices:
        if measuring and choice.operation == "all_reduce" and switch is not None:
            rows.append(_through_switch(choice, "to measure its capacity"))
        else:
            rows += _rows(choice, overrides)
    return ChoiceTable(tuple(rows))


def table_without_switch(workers: int, *, wire: str, links: Links = DEFAULT_LINKS) -> ChoiceTable:
    """Make the table that replaces a lost switch among the ranks that had joined it."""
    return build_table(ranks=workers, switch=None, wire=wire, links=links)


def check_words(*, ranks: int, switch: str | None, algorithm: str, wire: str) -> None:
    """Raise ValueError if the request is impossible for every placement of the ranks on hosts."""
    if (switch, algorithm, wire) == (None, "auto", "auto"):
        return  # always possible
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


@dataclass(frozen=True)
class _Choice:
    """An operation, and the inputs of the choice of its algorithm."""

    operation: str
    topology: Topology
    links: Links
    switch: str | None  # NETFOLD_SWITCH
    wire: str
    example_bytes: int | None = (
        None  # the size for which the reason of its row shows times; None: one that the row chooses
    )

    def case(self, size: float) -> Case:
        return case_of(size, self.topology, self.links, self.wire, _count(self.switch))

    def seconds(self, algorithm: str, size: float) -> float:
        count = _count(self.switch)
        return predict(self.operation, algorithm, size, self.topology, self.links, self.wire, switch=count)

    def why_not(self, algorithm: str) -> str | None:
        """Return the reason why `auto` cannot choose `algorithm`; None if it can."""
        if self.operation not in SUPPORTS.get(algorithm, ()):
            return "not built in"
        if (self.operation, algorithm) in BY_NAME_ONLY:
            return BY_NAME_ONLY[self.operation, algorithm]
        if algorithm in BY_SWITCH and self.switch is None:
            return "no NETFOLD_SWITCH"
        if algorithm == "shared_memory" and self.topology.node_count > 1:
            return f"the ranks are on {self.topology.node_count} hosts"
        if algorithm == "hierarchical" and not self.topology.has_levels:
            return "needs several hosts and several ranks on one"
        if self.wire in HALVES and not FORMULAS[self.operation, algorithm].narrow:
            return f"cannot convert tensors to {self.wire}"
        return None

    def refuse(self, requested: str, setting: str) -> None:
        """Raise ValueError if the requested algorithm cannot run the operation. setting: the request."""
        if requested in BY_SWITCH and self.switch is None:
            raise ValueError(f"{setting} needs an aggregator: start `netfold switch` and set NETFOLD_SWITCH=host:port")
        if self.wire in HALVES and not FORMULAS[self.operation, requested].narrow:
            able = [name for name in algorithms_of(self.operation) if FORMULAS[self.operation, name].narrow]
            needs = f"NETFOLD_WIRE_DTYPE={self.wire} needs {' or '.join(able)}"
            raise ValueError(f"{setting} sends tensors as they are; {needs}")
        why_not = self.why_not(requested)
        if why_not is not None and (self.operation, requested) not in BY_NAME_ONLY:
            raise ValueError(f"{setting} cannot be: {why_not}")


def _rows(choice: _Choice, overrides: Overrides) -> list[Row]:
    operation, topology, wire = choice.operation, choice.topology, choice.wire
    wire_note = "" if wire == "auto" else f"; f32 tensors travel as {wire} (NETFOLD_WIRE_DTYPE)"
    # On several ranks per host, one rank of each host joins the switch. An override may have all ranks join instead;
    # then no hierarchical operation uses the switch.
    by_host = topology.has_levels and not any(map(overrides.names, BY_SWITCH))
    between_hosts = choice if by_host or not topology.has_levels else replace(choice, switch=None)
    requested = overrides.algorithm(operation)
    suffix = ""
    if requested is not None:
        setting = overrides.setting(operation)
        if operation in SUPPORTS[requested]:
            choice.refuse(requested, setting)
            between = overrides.between(operation)
            if between is not None and operation in SUPPORTS[between]:
                replace(between_hosts, topology=Topology.apart(topology.node_count)).refuse(between, setting)
                return [Row(operation, 0, "hierarchical", wire, setting + wire_note, between)]
            if requested == "hierarchical":
                return [
                    Row(operation, size, name, wire, f"{setting}: {between} between hosts{wire_note}", between)
                    for size, name, between in _starts(between_hosts, ["hierarchical"])
                ]
            return [Row(operation, 0, requested, wire, setting + wire_note)]
        suffix = f"; {setting} does not do {operation}"
    if operation == "all_reduce" and choice.switch is not None and topology.node_count == 1:
        reason = "the ranks share a host, where shared memory would be faster, but NETFOLD_SWITCH names a switch"
        return [_through_switch(choice, reason + wire_note)]
    if topology.node_count == 1 and choice.why_not("shared_memory") is None:
        return [Row(operation, 0, "shared_memory", wire, "all ranks share memory" + suffix)]
    # With two hosts, each sends as many bytes in a ring as through a switch, so `split` gains nothing.
    excluded = BY_SWITCH if by_host else ("split",) if topology.node_count < 3 else ()
    able = [name for name in algorithms_of(operation) if choice.why_not(name) is None and name not in excluded]
    return _by_cost(between_hosts, able, wire_note + suffix)


def _through_switch(choice: _Choice, why: str) -> Row:
    reason = f"NETFOLD_SWITCH={choice.switch}: {why}"
    if choice.topology.has_levels:
        reason = f"in_network between hosts; {reason}"
        return Row("all_reduce", 0, "hierarchical", choice.wire, reason, "in_network")
    return Row("all_reduce", 0, "in_network", choice.wire, reason)


def _about_switch(choice: _Choice) -> str:
    """Describe the rate of the switch, and the switch's part in a large all_reduce of one rank per host."""
    hosts, links = choice.topology.node_count, choice.links
    case = Case(0, Topology.apart(hosts), links, _count(choice.switch))
    known = "measured" if links.switches else "assumed, a link as a rank's for each"
    of_link = case.through_switch * hosts / links.network.bytes_per_s
    return (
        f"NETFOLD_SWITCH={choice.switch} gives {case.through_switch / 1e6:.3g} MB/s ({known}: c = {of_link:.2g} of a "
        f"rank's link for {hosts}); with a ring beside it {split_rate(case) / 1e6:.3g} MB/s, {switch_part(case):.0%} "
        "through the switch"
    )


def _by_cost(choice: _Choice, able: list[str], suffix: str) -> list[Row]:
    """Rows of the cheapest algorithm at every size of the grid. Adjacent sizes with one algorithm share a row."""
    operation, wire = choice.operation, choice.wire
    if len(able) == 1:
        return [Row(operation, 0, able[0], wire, "the only algorithm that can run it here" + suffix)]
    starts = _starts(choice, able)
    rows = []
    for index, (size, name, between) in enumerate(starts):
        # The reason shows the times at a size inside the row: four times its start, if that is inside.
        after = starts[index + 1][0] if index + 1 < len(starts) else 1 << 40
        shown = _TYPICAL_BYTES if operation in UNSIZED else min(max(4 * size, 1024), after - 1)
        if choice.example_bytes is not None and operation not in UNSIZED and size <= choice.example_bytes < after:
            shown = choice.example_bytes
        sizes = f"{size} to {after - 1} bytes" if index + 1 < len(starts) else f"{size} bytes and more"
        example = f"{shown} bytes" if operation in UNSIZED else f"{shown} bytes, an example of {sizes}"
        times = sorted((choice.seconds(name, shown), name) for name in able)
        predicted = ", ".join(f"{name} {units.seconds(seconds)}" for seconds, name in times)
        reason = f"predicted for {example}: {predicted} ({choice.links.text()})"
        if operation not in UNSIZED and times[0][1] != name:
            gain = 1 - times[0][0] / choice.seconds(name, shown)
            reason += f"; {times[0][1]} would be {gain:.1%} faster there, too little for a row of its own"
        if between != "local":
            reason = f"{between} between hosts; {reason}"
        if operation == "all_reduce" and choice.switch is not None and {name, between} & set(BY_SWITCH):
            reason = f"{_about_switch(choice)}; {reason}"
        rows.append(Row(operation, size, name, wire, reason + suffix, between))
    return rows


def _starts(choice: _Choice, able: list[str]) -> list[tuple[int, str, str]]:
    """List (size, algorithm, algorithm between hosts) for each size from which another choice is the cheapest."""
    starts: list[tuple[int, str, str]] = []
    for size in (0,) if choice.operation in UNSIZED else _GRID:
        predicted = _TYPICAL_BYTES if choice.operation in UNSIZED else size
        times = {name: choice.seconds(name, predicted) for name in able}
        best = min(times, key=lambda name: times[name])
        if starts and times[best] >= _WORTH_A_ROW * times[starts[-1][1]]:
            best = starts[-1][1]
        between = best_between(choice.operation, choice.case(predicted)) if best == "hierarchical" else "local"
        if not starts or (best, between) != starts[-1][1:]:
            starts.append((size, best, between))
    return starts
