"""The measured collectives, with sizes and bandwidths as nccl-tests counts them. Pure.

A size is the larger of a rank's sent and received bytes. `busbw` is algbw times a factor that makes it comparable with
the link's rate for every collective and number of ranks (nccl-tests, doc/PERFORMANCE.md).
"""

from collections.abc import Callable
from dataclasses import dataclass

ROOT = 0
# nccl-tests' terms. Not every backend has avg.
REDOPS = ("sum", "prod", "min", "max", "avg")


@dataclass(frozen=True)
class Segment:
    """Consecutive elements that must equal entries `start`... of a source's message."""

    source: int | None  # a rank; None: the reduction over all ranks
    start: int
    count: int


@dataclass(frozen=True)
class Collective:
    name: str
    split: str | None  # the buffer, send or receive, that is a rank's part of the other; both, where both have parts
    in_place: bool  # one buffer suffices
    reduces: bool
    bus_factor: Callable[[int], float]

    def send_count(self, count: int, ranks: int) -> int:
        return count // ranks if self.split == "send" else count

    def receive_count(self, count: int, ranks: int) -> int:
        return count // ranks if self.split == "receive" else count

    def whole_count(self, size_bytes: int, item_bytes: int, ranks: int) -> int:
        """Return the elements of the larger buffer, rounded down to whole parts, as nccl-tests does."""
        count = size_bytes // item_bytes
        return count - count % ranks if self.split else count


def _all_but_one(ranks: int) -> float:
    return (ranks - 1) / ranks


COLLECTIVES = {
    one.name: one
    for one in (
        Collective("all_reduce", None, True, True, lambda ranks: 2 * (ranks - 1) / ranks),
        Collective("all_gather", "send", False, False, _all_but_one),
        Collective("reduce_scatter", "receive", False, True, _all_but_one),
        Collective("all_to_all", "both", False, False, _all_but_one),
        Collective("broadcast", None, True, False, lambda ranks: 1.0),
        Collective("reduce", None, True, True, lambda ranks: 1.0),
        Collective("gather", "send", False, False, _all_but_one),
        Collective("scatter", "receive", False, False, _all_but_one),
        Collective("send_recv", None, False, False, lambda ranks: 1.0),
        Collective("ping_pong", None, False, False, lambda ranks: 1.0),
        Collective("barrier", None, True, False, lambda ranks: 1.0),
    )
}


def parse_collective(name: str) -> Collective:
    """Read `all-reduce` or `all_reduce`. Raises ValueError."""
    known = COLLECTIVES.get(name.replace("-", "_"))
    if known is None:
        names = ", ".join(one.replace("_", "-") for one in COLLECTIVES)
        raise ValueError(f"collective {name!r} is not known; there are {names}")
    return known


def parse_redops(text: str) -> list[str]:
    """Read `sum`, `min,max` or `all`. Raises ValueError."""
    words = list(REDOPS) if text == "all" else text.split(",")
    if unknown := [word for word in words if word not in REDOPS]:
        raise ValueError(f"reduction {unknown[0]!r} is not known; there are {', '.join(REDOPS)} and all")
    return words


def partner(rank: int, ranks: int) -> int | None:
    """Return the other rank in a ping_pong of `rank`: 0 with 1, 2 with 3; None for the last of an odd number."""
    other = rank ^ 1
    return other if other < ranks else None


def expected(collective: Collective, rank: int, ranks: int, count: int) -> list[Segment]:
    """Return what `rank`'s receive buffer must hold, by source; `count`: from whole_count. Empty: anything."""
    part = count // ranks
    match collective.name:
        case "reduce" | "gather" if rank != ROOT:
            return []
        case "all_reduce" | "reduce":
            return [Segment(None, 0, count)]
        case "broadcast":
            return [Segment(ROOT, 0, count)]
        case "all_gather" | "gather":
            return [Segment(source, 0, part) for source in range(ranks)]
        case "scatter":
            return [Segment(ROOT, rank * part, part)]
        case "reduce_scatter":
            return [Segment(None, rank * part, part)]
        case "all_to_all":
            return [Segment(source, rank * part, part) for source in range(ranks)]
        case "send_recv":
            return [Segment((rank - 1) % ranks, 0, count)]
        case "ping_pong":
            other = partner(rank, ranks)
            return [] if other is None else [Segment(other, 0, count)]
        case _:
            return []
