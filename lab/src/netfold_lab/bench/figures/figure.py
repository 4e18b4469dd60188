"""A figure: how it is measured, and its text on the page."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from netfold_lab.bench.figures.budget import MOST_ROUNDS, Share
from netfold_lab.bench.rack_runner import Configuration, RackRunner, Timing, start_rack_runner
from netfold_lab.bench.runner import Runner
from netfold_lab.bench.spread import Spread, interleave, paired_ratios, spread
from netfold_lab.rack import Rack
from netfold_lab.rack.link import parse_link

Row = dict[str, Any]
Case = TypeVar("Case")

IN_NETWORK, RING, HOSTS_ONLY, GLOO = "netfold, in the network", "netfold, ring", "netfold, no switch", "gloo"
# Options of a group that reduces in the switch nearest to its hosts.
SWITCH = {"switch": "nearest", "algorithm": "all_reduce=in_network"}


@dataclass
class Measurements:
    """The measurements of a figure, as they are stored on disk.

    settings: of the whole figure, by name.
    rows: one for each round of a series at an x, with took_s and wrong.
    wrong_in_warmup: wrong elements in rounds that are not among the rows.
    cut: sentences on what was not measured for lack of time.
    lack: why there are no measurements; empty if there are.
    circumstances: machine, versions, load and the like at the end of the measurement.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    wrong_in_warmup: int = 0
    cut: list[str] = field(default_factory=list)
    lack: str = ""
    circumstances: dict[str, Any] = field(default_factory=dict)

    def add(self, series: str, x: Any, number: int, turn: Timing, **more: Any) -> None:
        """Add a round. Of the warm-up round -1 only the wrong elements are kept."""
        if number < 0:
            self.wrong_in_warmup += turn.wrong
        else:
            row = {"series": series, "x": x, "round": number, "took_s": turn.median_s, "wrong": turn.wrong}
            self.rows.append({**row, "again": turn.again, **more})

    def series(self) -> list[str]:
        return list(dict.fromkeys(row["series"] for row in self.rows))

    def xs(self, series: str | None = None) -> list[Any]:
        return list(dict.fromkeys(row["x"] for row in self.rows if series in (None, row["series"])))

    def values(self, series: str, x: Any, what: str = "took_s") -> list[float]:
        """The values of all rounds, in order."""
        return [row[what] for row in self.rows if (row["series"], row["x"]) == (series, x)]

    def spread(self, series: str, x: Any, what: str = "took_s") -> Spread:
        return spread(self.values(series, x, what))

    def ratios(self, over: tuple[str, Any], under: tuple[str, Any]) -> Spread:
        """The ratio of the times of two (series, x), computed for each round."""
        return spread(paired_ratios(self.values(*over), self.values(*under)))

    @property
    def wrong(self) -> int:
        return self.wrong_in_warmup + sum(int(row["wrong"]) for row in self.rows)

    @property
    def cores(self) -> int:
        return int(self.circumstances["machine"]["cores"])


@dataclass(frozen=True)
class Predicted:
    """A prediction of the cost model."""

    picture: str  # HTML
    header: Sequence[str]
    table: Sequence[Sequence[str]]
    text: str  # one or two sentences


@dataclass(frozen=True)
class FigureText:
    """The text of a figure on the page."""

    picture: str  # HTML
    header: Sequence[str]
    table: Sequence[Sequence[str]]
    measured: str  # one or two sentences
    short: Sequence[str]  # sentences: where the result is worse than the talk's, or the conditions differ
    predicted: Predicted | None = None


@dataclass(frozen=True)
class Figure:
    """A figure of a talk."""

    name: str
    title: str
    talk: str  # what the talk reported, and which talk it was
    weight: int  # the figure's share of the time, against the other figures' weights
    # Fills the measurements within the share of time. Raises BenchError or RackError.
    measure: Callable[[Share, Measurements], None]
    tell: Callable[[Measurements], FigureText]  # pure


@contextlib.contextmanager
def in_rack(rack: Rack, share: Share, taken: Measurements, mpi: str = "") -> Iterator[RackRunner]:
    """Start the switches and the ranks of a rack, and note the ranks' versions at the end."""
    rack.start_switch(lambda line: None)
    if rack.layout.racks > 1:
        rack.start_leaves(lambda line: None)
    with start_rack_runner(rack, deadline_s(share), mpi) as runner:
        yield runner
        note(taken, runner.runner)


def note(taken: Measurements, runner: Runner) -> None:
    """Note the ranks' versions and congestion control."""
    taken.circumstances |= {"versions": runner.versions, "tcp_congestion_control": runner.congestion_control}


def run_cases(
    share: Share, taken: Measurements, cases: Sequence[Case], turn: Callable[[Case, int], None], of: str = ""
) -> None:
    """Run every case in every round while there is time. Each round begins with another case.

    turn: receives the number of the round, -1 for the warm-up. of: the part of the figure, for the text.
    """
    for number, case in interleave(cases, share.rounds()):
        turn(case, number)
    if share.rounds_played < MOST_ROUNDS:
        taken.cut.append(f"The time sufficed for {share.rounds_played} rounds of {MOST_ROUNDS}{of}.")


def deadline_s(share: Share) -> float:
    """The deadline of the ranks: a figure runs its least rounds even after its time."""
    return max(180.0, 3 * share.left_s)


def cases_among(counts: Sequence[int], options: Mapping[str, Any], mpi: str) -> list[tuple[str, Configuration]]:
    """(series, configuration) for each number of hosts: the series of `options`, and the MPI if there is one."""
    named: list[tuple[str, dict[str, Any]]] = [(series, {"options": each}) for series, each in options.items()]
    if mpi:
        named.append((f"MPI ({mpi})", {"mpi": mpi}))
    return [(series, Configuration(f"{series}, {count}", count, **each)) for count in counts for series, each in named]


def mpi_series(taken: Measurements) -> list[str]:
    """The series of the MPI; empty without an MPI."""
    mpi = taken.settings.get("mpi", "")
    return [f"MPI ({mpi})"] if mpi else []


def describe_mpi(taken: Measurements, hosts: Sequence[int]) -> str:
    """Say what the times of the MPI measure among so many hosts, or that there is no MPI."""
    mpi = taken.settings.get("mpi", "")
    if not mpi:
        return "There is no MPI here to compare with (make bench-peers)."
    text = f"MPI is {mpi}, one rank per host, by TCP alone; its ranks spin while they wait"
    crowded = [str(count) for count in hosts if count > taken.cores]
    if not crowded:
        return f"{text}, each on its own core."
    return (
        f"{text}. Among {', '.join(crowded)} hosts, more than the {taken.cores} cores, its times measure how spinning "
        "ranks take cores from each other and from the links. The effect is largest for small messages."
    )


def in_rate(rate: str) -> str:
    """`1 Gbit/s`, from tc's notation."""
    bits = parse_link(rate).rate_bits
    return f"{bits / 1e9:g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:g} Mbit/s"


def in_ms(of: Spread) -> str:
    return _spread_text(of.scaled(1e3), 0)


def in_us(of: Spread) -> str:
    return _spread_text(of.scaled(1e6), 0)


def in_times(of: Spread) -> str:
    return _spread_text(of, 2)


def in_percent(of: Spread) -> str:
    return f"{of.median:.1%} ({of.p5:.1%} .. {of.p95:.1%})"


def _spread_text(of: Spread, decimals: int) -> str:
    return f"{of.median:.{decimals}f} ({of.p5:.{decimals}f} .. {of.p95:.{decimals}f})"
