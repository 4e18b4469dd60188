"""The collectives that are measured, as nccl-tests counts their sizes and bandwidths. Pure.

A size is the larger of what a rank sends and receives. `busbw` is algbw times a factor, so that it can be compared
with what the link carries whatever the collective and the number of ranks (nccl-tests, doc/PERFORMANCE.md).
"""

from collections.abc import Callable
from dataclasses import dataclass

ROOT = 0
# nccl-tests' words; avg is what not every backend has.
REDOPS = ("sum", "prod", "min", "max", "avg")


@dataclass(frozen=True)
class Segment:
    """A run of elements that must look like entries `start`... of a source's message; source None: of the sum."""

    source: int | None
    start: int
    count: int


@dataclass(frozen=True)
class Collective:
    """split: one of the two buffers is a rank's part of the other; in_place: one buffer is all there is."""

    name: str
    split: str | None
    in_place: bool
    reduces: bool
    bus_factor: Callable[[int], float]

    def send_count(self, count: int, ranks: int) -> int:
        return count // ranks if self.split == "send" else count

    def receive_count(self, count: int, ranks: int) -> int:
        return count // ranks if self.split == "receive" else count

    def whole_count(self, size_bytes: int, item_bytes: int, ranks: int) -> int:
        """Elements of the larger buffer: rounded down to whole parts, as nccl-tests does."""
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
    """From `all-reduce` or `all_reduce`."""
    known = COLLECTIVES.get(name.replace("-", "_"))
    if known is None:
        names = ", ".join(one.replace("_", "-") for one in COLLECTIVES)
        raise ValueError(f"collective {name!r} is not known; there are {names}")
    return known


def parse_redops(text: str) -> list[str]:
    """From `sum`, `min,max` or `all`."""
    words = list(REDOPS) if text == "all" else text.split(",")
    if unknown := [word for word in words if word not in REDOPS]:
        raise ValueError(f"reduction {unknown[0]!r} is not known; there are {', '.join(REDOPS)} and all")
    return words


def partner(rank: int, ranks: int) -> int | None:
    """Whom `rank` plays ping_pong with: 0 with 1, 2 with 3; None for the odd one out."""
    other = rank ^ 1
    return other if other < ranks else None


def expected(collective: Collective, rank: int, ranks: int, count: int) -> list[Segment]:
    """What `rank`'s receive buffer must hold; `count` as of whole_count. An empty list: anything may stand there."""
    part = count // ranks
    match collective.name:
        case "all_reduce":
            return [Segment(None, 0, count)]
        case "reduce":
            return [Segment(None, 0, count)] if rank == ROOT else []
        case "broadcast":
            return [Segment(ROOT, 0, count)]
        case "all_gather":
            return [Segment(source, 0, part) for source in range(ranks)]
        case "gather":
            return [Segment(source, 0, part) for source in range(ranks)] if rank == ROOT else []
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
