"""The claims of netfold as data: a backend, its gain over peers, and the place. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from netfold_lab.bench.config import SMALL_BYTES, BenchEnvironment, Trials

MB = 1 << 20
MPIS = ("mpi:openmpi", "mpi:intel", "mpi:intel:out", "mpi:mpich")
# In the order of the report.
SECTIONS = {
    "all-reduce": "Plain tensors: all_reduce through torch, and of 1 MB through Communicator",
    "shared": "Tensors in shared buffers: all_reduce",
    "small": "4 bytes: all_reduce",
    "collectives": "The other collectives, through torch",
    "messages": "A message to another rank and one back, through torch",
    "hosts": "Between hosts: TCP in a rack of 1 Gbit/s links, against the alpha-beta limit",
    "waiting": "CPU time used while waiting",
    "ddp": "A DDP training step",
    "in-network": "Through the software switch",
}
# For one stage: all trials of the same place, one after the other.
STAGE_DEADLINE_S = 600


@dataclass(frozen=True)
class Goal:
    """`ours` should take at most 1 / at_least of the time of the fastest of `peers`."""

    section: str
    place: BenchEnvironment
    collective: str
    size_bytes: int
    ours: str
    peers: tuple[str, ...]
    at_least: float | None  # None: the ratio is only reported
    against_limit: bool = False  # the peer is the network's alpha-beta limit; `peers` are measured and not compared


def all_goals(quick: bool) -> list[Goal]:
    goals = []
    for workers in (2, 4, 8):
        place = BenchEnvironment(workers, switch=False, deadline_s=STAGE_DEADLINE_S)
        more_than_cores = workers == 8
        large = ("all_reduce", 64 * MB)
        goals += [
            Goal("all-reduce", place, *large, "netfold", ("gloo",), None if more_than_cores else 4.0),
            Goal("all-reduce", place, *large, "netfold", MPIS, 0.9 if more_than_cores else 1.3),
            Goal("all-reduce", place, "all_reduce", MB, "netfold", ("gloo",), None if more_than_cores else 4.0),
            Goal("all-reduce", place, "all_reduce", MB, "communicator", MPIS, None if more_than_cores else 0.9),
            Goal("shared", place, *large, "netfold:shared", MPIS, 2.5),
            Goal("small", place, "all_reduce", 4, "netfold", ("gloo",), 5.0 if workers == 2 else None),
            Goal("small", place, "all_reduce", 4, "communicator", ("mpi:openmpi",), 1 / 3 if workers == 2 else None),
            Goal("small", place, "all_reduce", 4, "communicator", ("mpi:mpich",), None),
        ]
        if workers == 4 or (workers == 2 and not quick):
            goals += [
                Goal("collectives", place, name, size_bytes, "netfold", ("gloo",), 2.5)
                for name in ("all_gather", "reduce_scatter", "all_to_all", "broadcast")
                for size_bytes in (MB, 64 * MB)
            ]
    pair = BenchEnvironment(2, switch=False, deadline_s=STAGE_DEADLINE_S)
    for size_bytes, least in ((8, 4.0), (64 << 10, 2.0), (16 * MB, 1.0)):
        goals.append(Goal("messages", pair, "ping_pong", size_bytes, "netfold", ("gloo",), least))
    rack = BenchEnvironment(4, rack_rate="1gbit", switch=False, deadline_s=STAGE_DEADLINE_S)
    for size_bytes in (MB, 16 * MB) if quick else (MB, 16 * MB, 64 * MB):
        least = 1 / 1.10 if size_bytes == MB else 1 / 1.05
        goals.append(Goal("hosts", rack, "all_reduce", size_bytes, "netfold", ("gloo",), least, against_limit=True))
    for hosts in (4,) if quick else (4, 8):
        place = BenchEnvironment(hosts, rack_rate="1gbit", switch=True, deadline_s=STAGE_DEADLINE_S)
        goals.append(Goal("in-network", place, "all_reduce", 16 * MB, "netfold", ("gloo",), 1.35))
    for workers, size_bytes in ((4, 64 * MB), (4, 4), (2, 4)):
        place = BenchEnvironment(workers, switch=True, deadline_s=STAGE_DEADLINE_S)
        goals.append(Goal("in-network", place, "all_reduce", size_bytes, "netfold", ("gloo",), None))
    return goals


def places(goals: Sequence[Goal]) -> list[BenchEnvironment]:
    return list(dict.fromkeys(goal.place for goal in goals))


def trials_at(place: BenchEnvironment, goals: Sequence[Goal], quick: bool, missing: Sequence[str] = ()) -> list[Trials]:
    """Return the benchmarks that these goals need there, each with the backends of all its goals but the missing."""
    backends: dict[tuple[str, int], dict[str, None]] = {}
    for goal in goals:
        if goal.place == place:
            wanted = backends.setdefault((goal.collective, goal.size_bytes), {})
            wanted |= dict.fromkeys(backend for backend in (goal.ours, *goal.peers) if backend not in missing)
    return [
        Trials(
            collective,
            list(names),
            [size_bytes],
            rounds=rounds_of(size_bytes, quick),
            warmups=1 if quick else 2,
            breakdown=size_bytes <= SMALL_BYTES and collective != "ping_pong",  # a ping_pong is two operations
        )
        for (collective, size_bytes), names in backends.items()
    ]


def rounds_of(size_bytes: int, quick: bool) -> int:
    if size_bytes > 4 * MB:
        return 4 if quick else 9
    return 10 if quick else 25
