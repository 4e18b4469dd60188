"""What a figure is: a way to measure it, and what a page says of what was measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from netfold.bench.figures.budget import MOST_ROUNDS, Share
from netfold.bench.rack_runner import RackRunner, Timing
from netfold.bench.spread import Spread, paired_ratios, spread
from netfold.rack.link import parse_link

Row = dict[str, Any]
Case = TypeVar("Case")

IN_NETWORK, RING, HOSTS_ONLY, GLOO = "netfold, in the network", "netfold, ring", "netfold, no switch", "gloo"
# Options of a group that adds up in the switch nearest to its hosts.
SWITCH = {"switch": "nearest", "algorithm": "all_reduce=in_network"}


@dataclass
class Measurements:
    """What was measured, as it is kept on disk.

    settings: of the whole figure, by name. rows: a round of a series at an x each, with took_s and wrong.
    wrong_in_warmup: elements in rounds that are not among the rows. cut: what the time did not suffice for, a sentence
    each. lack: why there is nothing; empty where there is. circumstances: machine, versions, load and the like, when
    the measurement was over.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    wrong_in_warmup: int = 0
    cut: list[str] = field(default_factory=list)
    lack: str = ""
    circumstances: dict[str, Any] = field(default_factory=dict)

    def add(self, series: str, x: Any, number: int, turn: Timing, **more: Any) -> None:
        """A round; of the one before the first only what was wrong is kept."""
        if number < 0:
            self.wrong_in_warmup += turn.wrong
        else:
            row = {"series": series, "x": x, "round": number, "took_s": turn.median_s, "wrong": turn.wrong}
            self.rows.append({**row, "again": turn.again, **more})

    def note(self, turns: RackRunner) -> None:
        """What the ranks said of themselves."""
        self.circumstances |= {"versions": turns.versions, "tcp_congestion_control": turns.congestion_control}

    def series(self) -> list[str]:
        return list(dict.fromkeys(row["series"] for row in self.rows))

    def xs(self, series: str | None = None) -> list[Any]:
        return list(dict.fromkeys(row["x"] for row in self.rows if series in (None, row["series"])))

    def values(self, series: str, x: Any, what: str = "took_s") -> list[float]:
        """A round each, in their order."""
        return [row[what] for row in self.rows if (row["series"], row["x"]) == (series, x)]

    def spread(self, series: str, x: Any, what: str = "took_s") -> Spread:
        return spread(self.values(series, x, what))

    def ratios(self, over: tuple[str, Any], under: tuple[str, Any]) -> Spread:
        """Times of one series at an x over those of another at its own, round by round."""
        return spread(paired_ratios(self.values(*over), self.values(*under)))

    @property
    def wrong(self) -> int:
        return self.wrong_in_warmup + sum(int(row["wrong"]) for row in self.rows)

    @property
    def cores(self) -> int:
        return int(self.circumstances["machine"]["cores"])


@dataclass(frozen=True)
class Predicted:
    """What nobody measured here, and the cost model says. picture: an SVG element; said: one or two sentences."""

    picture: str
    header: Sequence[str]
    table: Sequence[Sequence[str]]
    said: str


@dataclass(frozen=True)
class FigureText:
    """What a page says. picture: an SVG element; measured: one or two sentences; short: a sentence each on where this
    falls short of the talk, or is unlike it; predicted: beside what was measured."""

    picture: str
    header: Sequence[str]
    table: Sequence[Sequence[str]]
    measured: str
    short: Sequence[str]
    predicted: Predicted | None = None


@dataclass(frozen=True)
class Figure:
    """talk: what it reported, and which it was. weight: its part of the time, beside the others'. measure: fills a
    Taken within its share of the time; raises BenchError or RackError. tell: pure."""

    name: str
    title: str
    talk: str
    weight: int
    measure: Callable[[Share, Measurements], None]
    tell: Callable[[Measurements], FigureText]


def run_cases(
    share: Share, taken: Measurements, cases: Sequence[Case], turn: Callable[[Case, int], None], of: str = ""
) -> None:
    """Every case in every round, another one first each time, as long as the time suffices. turn: has a round's number,
    -1 for the one that warms up. of: which part of the figure this is."""
    for number in share.rounds():
        for place in range(len(cases)):
            turn(cases[(number + place) % len(cases)], number)
    if share.rounds_played < MOST_ROUNDS:
        taken.cut.append(f"The time sufficed for {share.rounds_played} rounds of {MOST_ROUNDS}{of}.")


def deadline_s(share: Share) -> float:
    """For the ranks: a figure plays its least rounds even where the time is up."""
    return max(180.0, 3 * share.left_s)


def in_mb(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:g} MB"


def in_rate(rate: str) -> str:
    """`1 Gbit/s`, from how tc says it."""
    bits = parse_link(rate).rate_bits
    return f"{bits / 1e9:g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:g} Mbit/s"


def in_ms(of: Spread) -> str:
    return f"{of.median * 1e3:.0f} ({of.p5 * 1e3:.0f} .. {of.p95 * 1e3:.0f})"


def in_us(of: Spread) -> str:
    return f"{of.median * 1e6:.0f} ({of.p5 * 1e6:.0f} .. {of.p95 * 1e6:.0f})"


def in_times(of: Spread) -> str:
    return f"{of.median:.2f} ({of.p5:.2f} .. {of.p95:.2f})"
