"""Schedules: a seed becomes a shape of a job and a list of timed faults. Pure: no clock, no socket, no global draw.

One seed is one schedule, on every machine. Times are seconds since the first fault may begin.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """hosts: the host of each rank. parents: of each switch, the switch above it. named: by rank, its switches."""

    name: str
    hosts: tuple[int, ...]
    parents: tuple[int | None, ...]
    named: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.hosts)

    @property
    def host_count(self) -> int:
        return max(self.hosts) + 1


SHAPES = (
    Shape("one switch", (0, 1, 2), (None,), ((0,),) * 3),
    Shape("two ranks per host", (0, 0, 1, 1), (None,), ((0,),) * 4),
    Shape("two-level tree", (0, 1, 2), (None, 0, 0), ((1,), (1,), (2,))),
    Shape("side by side", (0, 1, 2), (None, None), ((0, 1),) * 3),
)

DIRECTIONS = ("in", "out", "both ways")
PROTOCOLS = ("udp", "tcp", "udp and tcp")
CUTS = tuple(f"{protocol}, {direction}" for protocol in PROTOCOLS for direction in DIRECTIONS)
ICMP_KINDS = (
    "fragmentation needed",
    "net unreachable",
    "host unreachable",
    "protocol unreachable",
    "port unreachable",
    "prohibited",
    "source quench",
    "redirect",
    "time exceeded",
    "parameter problem",
)


@dataclass(frozen=True)
class Kind:
    """The values that a kind of fault may have.

    for_s: least and most; hows: its variants; amounts: least and most of its figure.

    halts: whether no step can end meanwhile, whatever netfold does, since ranks cannot reach each other.
    """

    name: str
    places: tuple[str, ...]
    for_s: tuple[float, float]
    hows: tuple[str, ...] = ("",)
    amounts: tuple[float, float] = (1.0, 1.0)
    halts: bool = False


# A path between ranks comes back before NETFOLD_RECONNECT_S (10 s) is over: TCP repeats a lost segment at growing
# distances, up to as long again as the path was cut.
CUT_HOST_S = 4.0
KINDS = (
    Kind("kill switch", ("switch",), (0.2, 8)),
    Kind("stop switch", ("switch",), (0.1, 20)),
    Kind("cut switch", ("switch",), (0.3, 10), CUTS),
    Kind("shrink MTU", ("switch",), (1, 10), amounts=(576, 1400)),
    Kind("stop rank", ("rank",), (0.1, 20), halts=True),
    Kind("slow rank", ("rank",), (1, 8), amounts=(0.3, 0.9), halts=True),
    Kind("cut host", ("host",), (0.1, CUT_HOST_S), CUTS, halts=True),
    Kind("shrink host's MTU", ("host",), (0.3, CUT_HOST_S), amounts=(576, 1400), halts=True),
    Kind("ICMP", ("switch", "host"), (0.5, 2), ICMP_KINDS),
    Kind("duplicate and reorder", ("switch", "host"), (1, 10), amounts=(0.01, 0.3)),
    Kind("lose", ("switch", "host"), (1, 10), amounts=(0.001, 0.05)),
    Kind("garbage", ("switch", "host"), (0.5, 5), ("udp", "tcp")),
    Kind("copies", ("switch", "host"), (0.5, 5)),
    Kind("wrong token", ("switch", "host"), (0.5, 2)),
    Kind("full /dev/shm", ("host",), (1, 15)),
    Kind("few descriptors", ("switch", "rank"), (1, 10), amounts=(0, 8)),
    Kind("clock jumps", ("switch", "rank"), (1, 10), amounts=(-1e6, 1e6)),
)
KIND_OF = {kind.name: kind for kind in KINDS}
# Drawn; some are left out, since they exclude each other.
SECONDS_A_FAULT = 2.0
# Ends the job, so it is the last: the other ranks must say which rank is gone.
DIE = "kill rank"
# From the end of one fault that halts the ranks to the begin of the next one.
REST_S = 3.0


@dataclass(frozen=True)
class Fault:
    """From `at_s` on, for `for_s` seconds. place: the kind and the number of the place; how, amount: as in its Kind."""

    kind: str
    place: tuple[str, int]
    at_s: float
    for_s: float
    how: str = ""
    amount: float = 1.0

    @property
    def end_s(self) -> float:
        return self.at_s + self.for_s

    def __str__(self) -> str:
        what = f"{self.at_s:5.1f} s: {self.kind} at {self.place[0]} {self.place[1]} for {self.for_s:.1f} s"
        return what + (f" ({self.how})" if self.how else "") + ("" if self.amount == 1 else f" [{self.amount:.4g}]")


@dataclass(frozen=True)
class Schedule:
    """authenticated: tokens, TLS and MACs. faults: by their begin. dies: the rank that is killed at the end, if any."""

    seed: int
    seconds: float
    shape: Shape
    authenticated: bool
    faults: tuple[Fault, ...]
    dies: int | None

    def __str__(self) -> str:
        about = f"seed {self.seed}: {self.shape.name}, {'tokens' if self.authenticated else 'open'}"
        lines = [about, *map(str, self.faults)]
        return "\n  ".join([*lines, *([] if self.dies is None else [f"at the end: {DIE} {self.dies}"])])


def draw(seed: int, seconds: float, *, kinds: tuple[str, ...] = ()) -> Schedule:
    """The schedule of a seed. kinds: draw from these alone (all)."""
    generator = random.Random(seed)
    shape = SHAPES[seed % len(SHAPES)]
    counts = {"switch": len(shape.parents), "host": shape.host_count, "rank": shape.ranks}
    faults: list[Fault] = []
    for _ in range(max(2, round(seconds / SECONDS_A_FAULT))):
        kind = generator.choice([kind for kind in KINDS if not kinds or kind.name in kinds])
        place = generator.choice(kind.places)
        least, most = kind.for_s[0], min(kind.for_s[1], seconds)
        for_s = math.exp(generator.uniform(math.log(min(least, most)), math.log(most)))
        fault = Fault(
            kind.name,
            (place, generator.randrange(counts[place])),
            round(generator.uniform(0, seconds - for_s), 2),
            round(for_s, 2),
            generator.choice(kind.hows),
            generator.uniform(*kind.amounts),
        )
        if not any(_excludes(fault, other) for other in faults):
            faults.append(fault)
    dies = generator.randrange(shape.ranks) if generator.random() < 0.3 else None
    ordered = tuple(sorted(faults, key=lambda fault: fault.at_s))
    return Schedule(seed, seconds, shape, generator.random() < 0.5, ordered, dies)


def _excludes(one: Fault, other: Fault) -> bool:
    """Whether two faults may not overlap: undoing the first would undo the second, or they add up to a lost path."""
    same = one.place == other.place and _family(one) == _family(other)
    halting = KIND_OF[one.kind].halts and KIND_OF[other.kind].halts
    rest_s = REST_S if halting else 0.2
    return (same or halting) and one.at_s < other.end_s + rest_s and other.at_s < one.end_s + rest_s


def _family(fault: Fault) -> str:
    """Faults of one family change the same setting of a place."""
    for word in ("cut", "MTU"):
        if word in fault.kind:
            return word
    if fault.kind in ("kill switch", "stop switch", "few descriptors", "clock jumps", "stop rank", "slow rank"):
        return "process"
    return fault.kind
