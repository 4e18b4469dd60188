"""The worth of a switch behind a link of its own: all_reduce by `auto`, by a ring, through the switch alone.

The racks have a switch that is a host at the core, behind a link of c times a worker's link; c = P: in the switch's
place, with a port for each worker. The backends take turns, round by round, after as many rounds as `auto` needs to
find the parts of its split; the trials of the split (docs/explanation/algorithms.md) count. Times are the slowest
rank's, and every element is checked. The switch alone is left out where it would take more than four times a ring.

The bound is n/b (x + R (1-x)), with R = 2 (P-1)/P, b a link's rate less headers, and x where the switch, x P/c, ends
together with the links: n/b R / (1 + (R-1) c/P).
"""

from __future__ import annotations

from dataclasses import dataclass

from netfold_lab.bench.config import BenchEnvironment, Trials
from netfold_lab.bench.ranks import BenchError
from netfold_lab.bench.runner import start_runner
from netfold_lab.bench.spread import paired_ratios, spread
from netfold_lab.bench.table import markdown
from netfold_lab.rack import Rack, RackError
from netfold_lab.rack.aggregator import aggregator_argv, start_aggregator
from netfold_lab.rack.link import parse_link
from netfold_lab.rack.names import SWITCH_PORT, host_address

WARM_ROUNDS = 4
# Goals for auto's time: over the better of the other two, and over the bound.
MOST_OVER_BETTER, MOST_OVER_BOUND = 1.05, 1.10
# For a rack's rounds, all backends together.
DEADLINE_S = 900
# Of the aggregation protocol at an MTU of 1500: bytes of tensor in a packet, and the packet's bytes on the link.
PAYLOAD, PACKET = 1408, 1498
_SLOW = 4  # the switch alone is not measured where it would take this many times a ring
_BACKENDS = {"auto": "communicator", "ring": "communicator:ring", "in_network": "communicator:in_network"}


@dataclass(frozen=True)
class LinkSetup:
    """A rack, and what is summed in it."""

    rate: str
    hosts: int
    c: float  # the switch's link over a worker's; `hosts` or more: a port per worker; 0: host 0 is the switch
    size: int = 16 << 20  # bytes
    loss: str = "0%"  # on every link

    @property
    def has_ports(self) -> bool:
        return self.c >= self.hosts

    @property
    def name(self) -> str:
        return "P" if self.has_ports else f"{self.c:g}" if self.c else "a worker's"

    @property
    def bound_s(self) -> float:
        link = parse_link(self.rate, self.loss).rate_bits / 8 * PAYLOAD / PACKET
        return self.size / link * self._ring / (1 + (self._ring - 1) * min(1.0, self.c / self.hosts))

    @property
    def backends(self) -> tuple[str, ...]:
        slow = self.hosts > _SLOW * self._ring * self.c
        return ("auto", "ring") if slow else ("auto", "ring", "in_network")

    @property
    def _ring(self) -> float:
        return 2 * (self.hosts - 1) / self.hosts


@dataclass(frozen=True)
class LinkResult:
    seconds: dict[str, list[float]]  # of each round, by backend
    row: str  # the algorithm that auto chose
    part: float  # of auto's tensor that goes through the switch

    def over(self, backend: str) -> float:
        """Return auto's time over the backend's, paired by round."""
        return spread(paired_ratios(self.seconds["auto"], self.seconds[backend])).median

    def met(self, setup: LinkSetup) -> bool:
        """Return whether auto meets both goals."""
        better = max(self.over(backend) for backend in self.seconds if backend != "auto")
        bound = spread(self.seconds["auto"]).median / setup.bound_s
        return better <= MOST_OVER_BETTER and bound <= MOST_OVER_BOUND


def measure(setup: LinkSetup, rounds: int) -> LinkResult:
    """Measure in a rack built for this. Raises RackError, also where a rank fails or an element is wrong."""
    behind = setup.c > 0 and not setup.has_ports
    switch_rate = f"{parse_link(setup.rate, '0%').rate_bits * setup.c / 1e6:g}mbit" if behind else None
    place = BenchEnvironment(setup.hosts, deadline_s=DEADLINE_S)
    backends = [_BACKENDS[backend] for backend in setup.backends]
    with Rack(setup.hosts, setup.rate, setup.loss, switch_rate=switch_rate) as rack:
        if setup.c > 0:
            rack.start_switch(lambda line: None)
        else:
            argv = aggregator_argv(f"{host_address(0)}:{SWITCH_PORT}")
            aggregator = start_aggregator(lambda argv: rack.popen(0, argv, {}), argv, lambda line: None)
            rack.switch_address = aggregator.address
        try:
            with start_runner(place, ["communicator"], rack) as runner:
                trials = Trials("all_reduce", backends, [setup.size], rounds=rounds, warmups=WARM_ROUNDS)
                measured = dict(zip(setup.backends, runner.measure(trials)[0].backends, strict=True))
                row, part = runner.choice(_BACKENDS["auto"], setup.size)
        except BenchError as error:
            raise RackError(str(error)) from None
    for backend, one in measured.items():
        if one.refused is not None or one.wrong:
            raise RackError(f"{backend} of {setup.size} bytes: {one.refused or f'{one.wrong} elements were wrong'}")
    return LinkResult({name: [took / 1e9 for took in one.times_ns] for name, one in measured.items()}, row, part)


def table(found: dict[LinkSetup, LinkResult]) -> list[str]:
    """Return lines of Markdown."""
    header = ["link", "hosts", "c", "MB", "auto, ms", "through the switch", "ring, ms", "switch alone, ms"]
    header += ["auto / ring", "auto / switch", "auto / bound", "met"]
    rows = []
    for setup, taken in found.items():
        ms = {backend: spread([each * 1e3 for each in seconds]) for backend, seconds in taken.seconds.items()}
        times = {backend: f"{of.median:.0f}, {of.p5:.0f} .. {of.p95:.0f}" for backend, of in ms.items()}
        over = {backend: f"{taken.over(backend):.2f}" for backend in ms if backend != "auto"}
        rows.append(
            [
                setup.rate if setup.loss == "0%" else f"{setup.rate}, {setup.loss} lost",
                f"{setup.hosts}",
                setup.name,
                f"{setup.size >> 20}",
                times["auto"],
                f"{taken.row}, {taken.part:.0%}",
                times["ring"],
                times.get("in_network", "-"),
                over["ring"],
                over.get("in_network", "-"),
                f"{ms['auto'].median / 1e3 / setup.bound_s:.2f}",
                "yes" if taken.met(setup) else "**no**",
            ]
        )
    return [
        "c: the switch's link over a worker's. Milliseconds are the slowest rank's: median, 5% .. 95%. Ratios are of "
        "times in one round. Goals: auto over the better of the other two at most "
        f"{MOST_OVER_BETTER}, over the bound at most {MOST_OVER_BOUND:.2f}.",
        "",
        *markdown(header, rows),
    ]
