"""What a side must offer, and how sides are named."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

import netfold
from netfold.bench.collectives import Collective
from netfold.bench.pattern import Array
from netfold.bench.sizes import parse_dtype

MPIS = ("openmpi", "intel", "mpich")


class RefusedError(RuntimeError):
    """This side does not do that; the message is what it said. The benchmark goes on with the others."""


@dataclass(frozen=True)
class Buffer:
    """values: the memory as NumPy sees it, flat; native: the same memory as the side takes it."""

    values: Array
    native: Any


class Pending(Protocol):
    """What was started and is under way."""

    def wait(self) -> object: ...


class Side(Protocol):
    """One rank's end of one way to call collectives. Every rank makes the same calls in the same order."""

    in_place: bool

    def empty(self, count: int, dtype: str) -> Buffer:
        """A buffer of the kind that users of this side have. Raises RefusedError for a dtype it lacks."""
        ...

    def bind(self, collective: Collective, send: Buffer, receive: Buffer) -> Callable[[], object]:
        """The blocking call on these buffers, ready to be timed; `send` is `receive` where it runs in place."""
        ...

    def start(self, collective: Collective, send: Buffer, receive: Buffer) -> Callable[[], Pending]:
        """The call that starts all_reduce or all_to_all on these buffers and returns at once. Raises RefusedError."""
        ...

    def records(self) -> Any | None:
        """netfold's own event records, oldest first; None for anyone else."""
        ...


class World(Protocol):
    """One rank of a set of processes in which some sides live."""

    rank: int
    size: int
    versions: dict[str, str]

    def side(self, name: "SideName") -> Side: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class SideName:
    """label: unique in a run; world: which processes; kind: a torch backend's name, or the world's; variant: ''..."""

    label: str
    world: str
    kind: str
    variant: str

    @property
    def is_netfold(self) -> bool:
        return self.kind in ("netfold", "communicator")


def parse_side(text: str, label: str | None = None) -> SideName:
    """From `gloo`, `netfold:shared`, `communicator`, `mpi:intel:out`; ValueError says what there is."""
    first, *rest = text.split(":")
    if first == "mpi":
        if not rest or rest[0] not in MPIS or rest[1:] not in ([], ["out"]):
            raise ValueError(f"side {text!r} is not understood; there are {', '.join(f'mpi:{m}[:out]' for m in MPIS)}")
        return SideName(label or text, rest[0], rest[0], "".join(rest[1:]))
    if rest not in ([], ["shared"]) or (rest and first not in ("netfold", "communicator")) or not first:
        raise ValueError(f"side {text!r} is not understood; only netfold:shared and communicator:shared have variants")
    return SideName(label or text, "communicator" if first == "communicator" else "torch", first, "".join(rest))


def shared_empty(count: int, dtype: str) -> Array:
    """An array from netfold.empty(); bf16, which NumPy lacks, as its bits. Raises RefusedError where there is none."""
    make = getattr(netfold, "empty", None)
    if make is None:
        raise RefusedError("this netfold has no netfold.empty(), so no buffers of shared memory")
    return np.asarray(make(count, np.dtype("uint16" if dtype == "bf16" else parse_dtype(dtype).torch_name)))


def unique_labels(sides: Sequence[str]) -> list[str]:
    """The sides' names, with a number where one stands more than once: gloo, gloo#2."""
    seen: dict[str, int] = {}
    result = []
    for side in sides:
        seen[side] = seen.get(side, 0) + 1
        result.append(side if seen[side] == 1 else f"{side}#{seen[side]}")
    return result


def ping_pong(
    other: int | None, rank: int, send: Callable[[int], object], receive: Callable[[int], object]
) -> Callable[[], object]:
    """The call of one of two partners: the lower rank speaks first. Nothing for who has none."""
    if other is None:
        return lambda: None
    first, second = (send, receive) if rank < other else (receive, send)

    def play() -> None:
        first(other)
        second(other)

    return play
